"""Where instruction modules enter what they implement: the first word or two of an opcode -> the function that binds it.

A binder gets (machine, instruction) and returns a step, a function of a Group that executes the instruction for its lanes.
Warp instructions return (member mask operand or None for all lanes, step): the machine brings the lanes together first.
"""

BINDERS = {}
WARP_BINDERS = {}
WARPGROUP_BINDERS = {}
# "mbarrier.try_wait" -> a binder of (machine, instruction, basic block) that returns the block's end
END_BINDERS = {}
# functions of a machine whose blocks have all ended
BATCH_ENDS = []


def find(table, opcode):
    """The binder of an opcode: by its first two words, else by its first."""
    return table.get(".".join(opcode[:2])) or table.get(opcode[0])


def instruction(*names):
    """Enter a binder under the first words of opcodes."""

    def enter(binder):
        for name in names:
            assert name not in BINDERS, name
            BINDERS[name] = binder
        return binder

    return enter


def warpgroup_instruction(*names):
    """Enter the binder of instructions that the four warps of a warpgroup execute together; it returns a step."""

    def enter(binder):
        for name in names:
            WARPGROUP_BINDERS[name] = binder
        return binder

    return enter


def warp_instruction(*names):
    """Enter the binder of instructions that lanes of a warp execute together."""

    def enter(binder):
        for name in names:
            assert name not in WARP_BINDERS, name
            WARP_BINDERS[name] = binder
        return binder

    return enter
