import pytest

from tiercel.base.errors import ConfigError
from tiercel.hub.catalogue import is_safe_member, load_catalogue, parse_catalogue

GOOD = """
default = "tiny"
[[model]]
name = "tiny"
description = "a model"
file = "tiny.gguf"
size_bytes = 3
sha256 = "{digest}"
licence = "none"
[[model.source]]
kind = "wheel"
package = "tiny-model"
version = "1.0"
member = "tiny/model.bin"
size_bytes = 3
sha256 = "{digest}"
wheel_bytes = 100
""".format(digest="0" * 64)

# What is wrong -> (text in the good catalogue, what stands there instead).
WRONG = {
    "not TOML": ("default", "= default"),
    "a default without entry": ('default = "tiny"', 'default = "other"'),
    "an unknown key": ('licence = "none"', 'licence = "none"\nurl = "x"'),
    "a missing key": ('licence = "none"\n', ""),
    "no sources": ('[[model.source]]\nkind = "wheel"', '[model.other]\nkind = "wheel"'),
    "an unknown kind": ('kind = "wheel"', 'kind = "url"'),
    "a short digest": ("0" * 64, "0" * 63),
    "a digest in capitals": ("0" * 64, "A" * 64),
    "a file in a folder": ('"tiny.gguf"', '"../tiny.gguf"'),
    "a hidden file": ('"tiny.gguf"', '".tiny.gguf"'),
    "a name that is a path": ('name = "tiny"', 'name = "a/b"'),
    "a member outside": ('"tiny/model.bin"', '"../model.bin"'),
    "an absolute member": ('"tiny/model.bin"', '"/etc/passwd"'),
    "a member with a backslash": ('"tiny/model.bin"', "'tiny\\\\model.bin'"),
    "a package that is a flag": ('"tiny-model"', '"--index-url"'),
    "a version with a space": ('"1.0"', '"1.0 --pre"'),
    "a size that is text": ("wheel_bytes = 100", 'wheel_bytes = "100"'),
    "a size of 0": ("wheel_bytes = 100", "wheel_bytes = 0"),
    "sources of another size": (
        'member = "tiny/model.bin"\nsize_bytes = 3',
        'member = "tiny/model.bin"\nsize_bytes = 4',
    ),
    "a name twice": ("default = ", "x = 1\ndefault = "),
}


def test_the_good_catalogue_is_read():
    catalogue = parse_catalogue(GOOD)
    assert catalogue.names == ("tiny",)
    assert catalogue.find("tiny").sources[0].member == "tiny/model.bin"
    assert catalogue.find("Tiny") is None


@pytest.mark.parametrize("what", WRONG)
def test_a_catalogue_with_a_wrong_value_is_refused(what):
    right, wrong = WRONG[what]
    assert right in GOOD
    with pytest.raises(ConfigError, match=r"hub\.catalogue"):
        parse_catalogue(GOOD.replace(right, wrong))


def test_a_name_that_stands_twice_is_refused():
    model = GOOD[GOOD.index("[[model]]") :]
    with pytest.raises(ConfigError, match="twice"):
        parse_catalogue(GOOD + model)


def test_the_shipped_catalogue_has_the_default_and_no_address():
    catalogue = load_catalogue()
    assert catalogue.default == "smollm2-135m"
    assert set(catalogue.names) >= {"smollm2-135m", "gemma3-270m"}
    assert [len(entry.sources) for entry in catalogue.entries] == [1, 4]


@pytest.mark.parametrize("name", ["a/b.txt", "a b/c", "a/..b"])
def test_a_plain_relative_member_is_safe(name):
    assert is_safe_member(name)


@pytest.mark.parametrize(
    "name", ["", "/a", "../a", "a/../b", "a//b", "a/.", "a\\b", "c:/a", "a\x00b", "a/" + "b" * 600]
)
def test_a_member_that_could_leave_its_folder_is_not_safe(name):
    assert not is_safe_member(name)
