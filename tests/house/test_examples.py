"""The examples, run as they are."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [pytest.param("hugging_face_trainer", marks=pytest.mark.slow), "lightning_module"])
# Lightning reads its trees through a check that torch has deprecated, and advises more workers for its DataLoaders
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_an_example_trains_a_quantized_model_and_exports_it(name: str, tmp_path: Path):
    out = tmp_path / "model.onnx"
    found = example(name).main(str(out))
    assert out.exists()
    assert found["float"] > 0.9
    assert found["trained"] > found["quantized"]


def test_every_example_is_run():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == ["hugging_face_trainer", "lightning_module"]
