"""Run lessons and write their pages: python scripts/lessons/make_pages.py [NUMBER …] (all of them where none is named).

The pages that are checked in show what a machine without a GPU sees, so that nobody's timings stand for another's.
"""

import sys

import lesson


def main(numbers):
    """Write the pages of these lessons."""
    folder = lesson.FOLDER / "pages"
    for number, path in lesson.files().items():
        if numbers and number not in numbers:
            continue
        for old in folder.glob(f"{path.stem}*"):
            old.unlink()
        lesson.perform(path, folder, gpu=False)
    if not numbers:
        lines = [f"{number}. [{lesson.title(path)}]({path.stem}.md)" for number, path in lesson.files().items()]
        text = "# Lessons\n\nRemade by `python scripts/lessons/make_pages.py`.\n\n" + "\n".join(lines) + "\n"
        (folder / "README.md").write_text(text)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
