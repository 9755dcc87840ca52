import pytest

from dsattn.cli.tables import amount, share, table


def test_columns_stand_under_their_heads():
    assert table(["name", "n"], [["a", "10"], ["longer", "1"]]) == "name     n\na       10\nlonger   1"
    assert table(["name", "word"], [["a", "b"]], words=True) == "name  word\na     b"
    assert table(["name"], []) == "name"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (999.7, "1 KFLOP"),
        (1234, "1.23 KFLOP"),
        (5e13, "50 TFLOP"),
        (3e25, "3e+04 ZFLOP"),
    ],
)
def test_amounts(value, text):
    assert amount(value, "FLOP") == text


def test_shares():
    assert share(0.1234) == "12.3 %"
    assert share(None) == "-"
