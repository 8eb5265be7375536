"""Files in the forms that ONNX Runtime computes fast: written, opened, and read back as the sim that they came from."""

import onnx
import onnxruntime as ort
import torch

import qsdk


def exported(model, batches, config, folder, *, axes=None, **options):
    """The sim, its file, the types of the nodes that the runtime's default level runs, and the outputs of both."""
    sim = qsdk.quantize(model.eval(), batches[0], config, dynamic_shapes=axes)
    qsdk.calibrate(sim, batches, progress=False)
    path = folder / "model.onnx"
    qsdk.export(sim, path, **options)
    opened = ort.SessionOptions()
    opened.log_severity_level, opened.optimized_model_filepath = 4, str(folder / "optimized.onnx")
    session = ort.InferenceSession(path, opened, providers=["CPUExecutionProvider"])
    ran = [node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node]
    with torch.no_grad():
        wanted = sim(batches[0]).numpy()
    return sim, path, ran, wanted, session.run(None, {session.get_inputs()[0].name: batches[0].numpy()})[0]


def require_same_sim(sim, path, batches, folder, **options):
    """The file is read back as what the sim has, and written again byte for byte."""
    parity = qsdk.check_parity(sim, path, batches, progress=False).summary
    assert parity["passed"]
    assert parity["weights_max_lsb"] == 0
    assert "nodes written in another way" not in parity
    assert not [row for row in qsdk.validate(path).rows if row["rule"] not in ("default_session", "speed")]
    again = qsdk.quantize(path, None)
    assert sorted(map(str, again.encodings.values())) == sorted(map(str, sim.encodings.values()))
    qsdk.export(again, folder / "again.onnx", **options)
    assert (folder / "again.onnx").read_bytes() == path.read_bytes()
