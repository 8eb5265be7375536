"""Run the float and the quantized model side by side, from the inputs of one step to those of the next."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from onnx_backend.runtime.bounded_session import bounded_session
from onnx_backend.runtime.feeds import DeclaredInput, as_feeds, batches_of, run_session
from onnx_backend.runtime.providers import Providers
from onnx_backend.walk.live_tensors import LiveTensors
from onnx_backend.walk.sections import Section, Stream
from onnx_backend.walk.steps import LayerGroup

Array = npt.NDArray[Any]
FLOAT, QUANTIZED = 0, 1


class PairedRun:
    """Both models and how far they have been run.

    Attributes:
        streams: the float and the quantized model.
        live: tensors that were computed and are read later on.
        batches: their number.
        float_seconds: spent in the float model.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        places: Sequence[LayerGroup],
        live: LiveTensors,
        in_memory: int,
        providers: Providers,
    ) -> None:
        """Find the tensors that each step needs.

        Args:
            streams: the float and the quantized model.
            places: the steps.
            live: empty.
            in_memory: the most bytes of stored tensors that a section holds; more are written to a file.
            providers: to run on.
        """
        self.streams, self.live = streams, live
        self.batches, self.float_seconds = 0, 0.0
        self._in_memory, self._providers = in_memory, providers
        self._targets = [[place.tensors(stream) for place in places] for stream in streams]
        self._targets[FLOAT].append(streams[FLOAT].outputs)
        self._targets[QUANTIZED].append([])
        self._depths = [
            stream.depths({stream.at[call.tag]: step for step, place in enumerate(places) for call in place.calls})
            for stream in streams
        ]

    def start(self, data: Iterable[Any], *, progress: bool) -> None:
        """Run every batch up to the first step.

        Raises:
            DataError: no data, or data the model does not take.
        """
        sections, kept = self._sections(0)
        sessions = [self._session(number, section) for number, section in enumerate(sections)]
        inputs = [DeclaredInput(value) for value in self.streams[FLOAT].given.values()]
        for place, values in batches_of(data, "first layers", progress):
            feeds = {name: _writable(value) for name, value in as_feeds(values, inputs, f"batch {place}").items()}
            batch = self.batches  # of those that count
            for number, section in enumerate(sections):
                for name in kept[number] & feeds.keys():
                    self.live.put((number, batch, name), feeds[name])
                self._run(number, batch, section, sessions[number], feeds)
            self.batches += 1

    def reach(self, step: int) -> None:
        """Run every batch up to the inputs of a step, and drop tensors that no later step needs."""
        missing = [self._missing(number, step, step + 1) for number in (FLOAT, QUANTIZED)]
        clean = [[name for name in names if self._depths[n].get(name, -1) < step] for n, names in enumerate(missing)]
        if any(clean):
            sections, kept = self._sections(step)
            self._run_all(sections)
        else:
            kept = [self._needed(number, step) for number in (FLOAT, QUANTIZED)]
        self.live.keep(lambda key: key[2] in kept[key[0]])
        # an input that depends on the step itself is computed by the current model, and again later
        ahead = [self._missing(number, step, step + 1) for number in (FLOAT, QUANTIZED)]
        self._run_all([stream.section(names) for stream, names in zip(self.streams, ahead, strict=True)])

    def finish(self) -> None:
        """Measure the float time behind the last step on one batch, and drop everything."""
        outputs = self._missing(FLOAT, len(self._targets[FLOAT]) - 1)
        section = self.streams[FLOAT].section(outputs)
        session = self._session(FLOAT, section)
        self._run(FLOAT, 0, section, session)  # warm up: the first run takes longer
        before = self.float_seconds
        self._run(FLOAT, 0, section, session)
        self.float_seconds += (self.float_seconds - before) * (self.batches - 1)
        self.live.clear()

    def _sections(self, step: int) -> tuple[list[Section], list[set[str]]]:
        """Return what to run now for this and later independent steps, and the tensors to keep then."""
        sections, kept = [], []
        for number, stream in enumerate(self.streams):
            wanted = [name for name in self._missing(number, step) if self._depths[number].get(name, -1) < step]
            later = stream.section(self._remaining(number, step))
            section = stream.section(wanted)
            section = stream.section([*wanted, *stream.sizes_in(section, later)])
            stream.finish(section)
            kept.append(self._needed(number, step))
            computed = stream.made_in(section) & kept[number]
            sections.append(Section(section.nodes, section.inputs, sorted(computed)))
        return sections, kept

    def _remaining(self, number: int, step: int) -> list[str]:
        return [name for names in self._targets[number][step:] for name in names]

    def _needed(self, number: int, step: int) -> set[str]:
        """Return the tensors that this step and all later ones need."""
        return set(self.streams[number].section(self._remaining(number, step)).inputs)

    def _missing(self, number: int, step: int, end: int | None = None) -> list[str]:
        names = (name for found in self._targets[number][step:end] for name in found)
        unavailable = (name for name in names if (number, 0, name) not in self.live)
        return [name for name in dict.fromkeys(unavailable) if not self.streams[number].is_stored(name)]

    def _run_all(self, sections: Sequence[Section]) -> None:
        for number, section in enumerate(sections):
            if section.wanted:
                session = self._session(number, section)
                for batch in range(self.batches):
                    self._run(number, batch, section, session)

    def _run(
        self,
        number: int,
        batch: int,
        section: Section,
        session: ort.InferenceSession | None,
        feeds: Mapping[str, Array] | None = None,
    ) -> None:
        if session is None:
            return
        read = {
            name: feeds[name] if feeds is not None and name in feeds else self.live.get((number, batch, name))
            for name in section.inputs
        }
        began = time.perf_counter()
        values = run_session(session, read, f"batch {batch}")
        if number == FLOAT:
            self.float_seconds += time.perf_counter() - began
        for name, value in zip(section.wanted, values, strict=True):
            self.live.put((number, batch, name), value)

    def _session(self, number: int, section: Section) -> ort.InferenceSession | None:
        """Return a session for a section, in the settings of the simulation; None where there is nothing to run."""
        if not section.wanted:
            return None
        stream, batches = self.streams[number], range(self.batches)
        infos = [
            stream.info(name, [self.live.facts((number, batch, name)) for batch in batches if name not in stream.given])
            for name in section.inputs
        ]
        model, large = stream.model(section, infos)
        return bounded_session(model, large, self._in_memory, providers=self._providers, shares_memory=True)


def _writable(value: Array) -> Array:
    """Return an array whose memory can become a tensor: read-only ones are copied."""
    return value if value.flags.writeable else np.array(value)
