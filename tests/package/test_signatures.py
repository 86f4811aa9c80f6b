"""No native function has more than seven parameters: the rest is a struct."""

import re

import pytest
from support.helpers import ROOT

MOST = 7
FOLDERS = "op", "kernels", "collective", "c_api"
# "const double* a", "Request", "T (&x)[2]", "Parameters... arguments", "int n = 3"
PARAMETER = re.compile(
    r"(const\s+)?(typename\s+)?[A-Za-z_][\w:]*\s*(<.*>)?(::\w+)?(\s+const)?"
    r"((\s*[*&]+|\.\.\.|\s)\s*(const\s+)?(\w+|\(&\w+\))?(\[\w*\])*)?(\s*=.*)?",
    re.S,
)


def lists(text):
    """Offset and items of every list in parentheses, split at its own commas."""
    opened = []
    for match in re.finditer(r"[(){}\[\],<>;]|->", text):
        character, at = match[0], match.start()
        if character in "([{<":
            opened.append((character, at, [at + 1]))
        elif character == "," and opened:
            opened[-1][2].append(at + 1)
        elif character == ";":
            opened = [entry for entry in opened if entry[0] != "<"]
        elif character in ")]}>" and opened:
            pair = "([{<"[")]}>".index(character)]
            while character != ">" and opened and opened[-1][0] == "<":
                lost = opened.pop()  # it was a comparison
                if opened:
                    opened[-1][2].extend(lost[2][1:])
            if opened and opened[-1][0] == pair:
                _, begin, starts = opened.pop()
                if character == ")":
                    ends = [start - 1 for start in starts[1:]] + [at]
                    yield begin, [text[a:b].strip() for a, b in zip(starts, ends)]


def without_comments(text):
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"^\s*#.*(\\\n.*)*", "", text, flags=re.M)


def too_long(text):
    """The parameter lists of more than MOST items; calls have other items."""
    for _, items in lists(without_comments(text)):
        if len(items) > MOST and all(PARAMETER.fullmatch(item) for item in items):
            if not all(re.fullmatch(r"[\w:.]+", item) for item in items):
                yield items


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_has_more_than_seven_parameters(folder):
    files = [p for p in (ROOT / "src" / folder).rglob("*") if p.is_file()]
    assert files
    found = {
        f"{path.relative_to(ROOT)}: ({', '.join(items)})"
        for path in files
        for items in too_long(path.read_text())
    }
    assert found == set()


SIX = "const double* a, int b, Layout& c, std::vector<std::pair<int, int>> d, T* e, T f"


@pytest.mark.parametrize(
    "declaration, parameters",
    [
        (f"void F({SIX}, int g);", 7),
        (f"void F({SIX}, /* a, b */ int, const T (&h)[2]) const {{", 8),
        (f"template <typename T, int n>\nF<T>::F({SIX}, int, bool = true) {{}}", 8),
        (f"  void (*f)({SIX},\n  typename Map::Arguments g, void* const h);", 8),
        ("return F(a, b, c, d, e, f, g, h, i);", 0),
        ("return F(a * b, &c, d[1], e < f, g(1, 2), h->i, 1, 2, x > 3);", 0),
    ],
)
def test_what_is_counted(declaration, parameters):
    found = [len(items) for items in too_long(declaration)]
    assert found == ([parameters] if parameters > MOST else [])
