"""Every example in the README runs and prints what it says there."""

import doctest
import re
from pathlib import Path

from rope_ops.__main__ import main

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"^```pycon\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_examples_print_what_they_say():
    text = "\n".join(EXAMPLES)
    test = doctest.DocTestParser().get_doctest(text, {}, "README.md", "README.md", 0)
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert result.attempted >= 10 and result.failed == 0


def _comparable(report):
    """The report without what differs from run to run: milliseconds and the machine."""
    lines = [line for line in report.strip().splitlines() if not line.startswith(("machine:", "skipped:"))]
    return [re.sub(r"(\d+\.\d +)\d+\.\d\d  ", r"\1", line.replace("-", "")).split() for line in lines]


def test_printed_report_is_what_the_command_prints(capsys):
    main(["--device", "cpu"])
    printed = re.findall(r"^```text\n(rope-ops .*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    assert _comparable(printed[0]) == _comparable(capsys.readouterr().out)
