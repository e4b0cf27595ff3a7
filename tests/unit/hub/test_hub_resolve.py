import pytest

from tiercel.base.errors import ModelNotFound
from tiercel.hub.catalogue import Catalogue
from tiercel.hub.hf_source import choose_gguf
from tiercel.hub.resolve import is_model_name, resolve
from tiercel.hub.store import ModelStore


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def ask(make_shelf, tmp_path, here):
    """`resolve` with a catalogue of one tiny model whose wheels are on disk."""
    shelf = make_shelf()
    store = ModelStore(tmp_path / "models", fetch_wheel=shelf)
    catalogue = Catalogue("tiny", (shelf.entry,))

    def resolve_here(name, **options):
        return resolve(name, store=store, catalogue=catalogue, **options)

    resolve_here.shelf = shelf
    return resolve_here


def test_no_name_is_the_catalogues_default(ask):
    found = ask(None)
    assert (found.display_name, found.source) == ("tiny", "catalogue")
    assert found.path.read_bytes() == ask.shelf.content


def test_a_catalogue_name_is_fetched_once(ask):
    assert ask("tiny") == ask("tiny")
    assert len(ask.shelf.asked) == 3


def test_offline_fetches_nothing_and_finds_what_is_here(ask):
    with pytest.raises(ModelNotFound, match=r"tiercel pull tiny"):
        ask("tiny", offline=True)
    assert ask.shelf.asked == []
    path = ask("tiny").path
    assert ask(None, offline=True).path == path


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(ask, here):
    (here / "llama").mkdir()
    (here / "small.GGUF").touch()
    assert (ask("llama").display_name, ask("llama").source) == ("llama", "path")
    assert ask("./llama/").display_name == "llama"
    assert ask(".").display_name == "here"
    assert ask("small.GGUF").display_name == "small"


def test_a_path_comes_before_a_catalogue_name(ask, here):
    (here / "tiny").mkdir()
    assert ask("tiny").source == "path"
    assert ask(None).source == "catalogue"


def test_a_path_comes_before_a_repository(ask, here):
    (here / "org" / "name").mkdir(parents=True)
    assert ask("org/name").source == "path"


def test_another_kind_of_file_is_refused_with_what_to_name(ask, here):
    (here / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match="name its folder"):
        ask("model.safetensors")


@pytest.mark.parametrize(
    "name", ["tinny", "", "a b/c", "org/name/more", "/absent/model.gguf", "x" * 5000, "a\0b", "~nobody/x"]
)
def test_an_unknown_name_is_told_what_names_there_are(ask, name):
    with pytest.raises(ModelNotFound, match=r"catalogue name \(tiny\).*org/name") as caught:
        ask(name)
    assert len(str(caught.value)) < 500


def test_an_unknown_name_is_told_the_nearest(ask):
    with pytest.raises(ModelNotFound, match="did you mean tiny"):
        ask("tinny")


@pytest.mark.parametrize("name", ["tiny", "."])
def test_a_revision_of_what_has_none_is_refused(ask, name):
    with pytest.raises(ModelNotFound, match="revision"):
        ask(name, revision="main")


def test_a_home_folder_is_expanded(ask, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    (here / "llama").mkdir()
    assert ask("~/llama").path == here / "llama"


MODELS = [
    "smollm2-135m",
    "org/name",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "and/or",
    "org/name:Q4_K_M",
    ".",
    "here.gguf",
]
PROMPTS = [
    "Why is the sky blue?",
    "hello",
    "a b/c",
    "a/b/c",
    "",
    "/",
    "a/",
    "/b",
    "https://x/y",
    "what is 1/2?",
    "x" * 9000,
    "org/name\n",
    "é/b",
]


@pytest.mark.parametrize("text", MODELS)
def test_the_form_of_a_model_is_seen(text, here):
    (here / "here.gguf").touch()
    assert is_model_name(text)


@pytest.mark.parametrize("text", [text for text in PROMPTS if text != "/"])
def test_a_prompt_is_not_taken_for_a_model(text, here):
    assert not is_model_name(text)


NAMES = ["m-Q4_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("pick", "chosen"), [("Q8_0", "m-Q8_0.gguf"), ("q4_k", "m-Q4_K.gguf"), ("Q4_K_M", "m-Q4_K_M.gguf")]
)
def test_a_part_of_the_name_picks_the_file(pick, chosen):
    assert choose_gguf(NAMES, pick, "x") == chosen


@pytest.mark.parametrize("pick", [None, "Q", "Q2"])
def test_a_choice_that_fits_several_or_none_lists_them(pick):
    with pytest.raises(ModelNotFound, match=r"m-Q4_K\.gguf, m-Q4_K_M\.gguf.*org/name:Q4_K_M"):
        choose_gguf(NAMES, pick, "x")


def test_a_piece_of_a_split_model_is_refused():
    with pytest.raises(ModelNotFound, match="one piece"):
        choose_gguf(["m-00001-of-00002.gguf"], None, "x")
