"""Workloads on paced instances, with the options of the server and those of the simulation that
predicts it.

Real hardware is taken at a multiple of its speed, and so are the rates, for shorter runs.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from sterna.cli.serve.emulated_options import CPU_BLOCK_SIZE
from sterna.engine.emulated.config import Preemption, StepMode
from sterna.engine.emulated.durations import CopyTime, StepTime
from sterna.engine.emulated.profiles import Profile, profile

POLICIES = ("sterna", "llumnix", "infaas++", "round-robin", "llm-d", "dynamo-tuned")
"""Those that are compared, in the order of the table."""

TUNED = ("llm-d-tuned", "sglang-tuned")
"""Rules with the parameters of a search, compared where prompts begin alike: the defaults are for
larger engines and longer prompts."""

COPY_TIME = CopyTime(block_s=5e-5, stage_s=1e-2)
"""Of the tiny model's blocks through shared memory, in the simulation: assumed, not measured."""


WAYS_S = {4: 0.018, 8: 0.029}
"""How long a request is on its way from the client to an instance and back, by the number of
instances that share two cores with it: of the time to its first token that is outside of engines
(`runs`), what is left without the half step that it waits there, with round robin and ShareGPT's
lengths (a run of 460 requests each, on an AMD EPYC with AVX-512)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on paced instances.

    Attributes:
        name: in rows and tables.
        profile: the hardware, by its name.
        speed: steps last as long as the profile's, divided by this.
        instances: their number.
        workload: options of `sterna simulate` for the requests.
        rate: of the hardware without `speed`, in requests or sessions a second.
        requests: their number.
        max_total_tokens: longer requests are left out, or drawn again.
        policies: those that are compared.
    """

    name: str
    profile: str
    speed: float
    instances: int
    workload: tuple[str, ...]
    rate: float
    requests: int
    max_total_tokens: int
    policies: tuple[str, ...] = POLICIES

    @property
    def description(self) -> str:
        """All that decides what is measured, but for the policy. That the step times are the same
        as before shows the duration of one that has prompts and decodes."""
        mixed_s = self.hardware().step_time.duration_s(512, 512**2, 16, 16_000)
        return (
            f"{self.profile}, {self.speed:g} times as fast, {self.instances} instances, "
            f"{' '.join(self.workload)}, {self.rate:g} a second, {self.requests} requests of at "
            f"most {self.max_total_tokens} tokens, a step of 512 tokens of a prompt and 16 decodes "
            f"of 1,000 in {1000 * mixed_s:.3f} ms"
        )

    def hardware(self) -> Profile:
        """The profile that server and simulation have: vLLM 1's rules, the block size of its CPU
        build, and the case's speed."""
        chosen = profile(self.profile)
        engine = chosen.engine
        num_tokens = engine.num_blocks * engine.block_size
        steps = {name: each / self.speed for name, each in asdict(chosen.step_time).items()}
        return replace(
            chosen,
            name=f"{chosen.name}-x{self.speed:g}",
            engine=replace(
                engine,
                num_blocks=num_tokens // CPU_BLOCK_SIZE,
                block_size=CPU_BLOCK_SIZE,
                watermark=0.0,
                step_mode=StepMode.CHUNKED,
                preemption=Preemption.LAST_ADMITTED,
                keeps_block_free=False,
                max_num_batched_tokens=2_048,
                prefix_caching=True,
            ),
            step_time=StepTime(**steps),
            copy_time=COPY_TIME,
        )

    def write_hardware(self, folder: Path) -> Path:
        """Write the profile as a file for `--profile`."""
        return write_hardware(self.hardware(), folder)

    def serve_options(self, model: Path, hardware: Path, policy: str) -> list[str]:
        """The options of `sterna serve`."""
        return [
            *(str(model), "--engine", "paced", "--profile", str(hardware)),
            *("--instances", str(self.instances), "--policy", policy),
            *("--max-model-len", str(self.max_total_tokens), "--dtype", "float32"),
            *("--enforce-eager", "--enable-prefix-caching"),
        ]

    def simulate_options(self, hardware: Path, seed: int) -> list[str]:
        """The options of `sterna simulate`. Loads are reported when a step has been scheduled, as
        by the server's instances (but see `Report.STEP`)."""
        return [
            *self.workload,
            *("--rate", f"{self.rate * self.speed:g}"),
            *("--requests", str(self.requests), "--seed", str(seed)),
            *("--max-total-tokens", str(self.max_total_tokens)),
            *("--profile", str(hardware), "--instances", str(self.instances)),
            *("--report", "step", "--set", f"dispatch_delay_s={WAYS_S.get(self.instances, 0.0)}"),
        ]


def write_hardware(hardware: Profile, folder: Path) -> Path:
    """Write the profile as a file for `--profile`."""
    engine = {
        **asdict(hardware.engine),
        "step_mode": hardware.engine.step_mode.value,
        "preemption": hardware.engine.preemption.value,
    }
    document = {**asdict(hardware), "engine": engine}
    path = folder / f"{hardware.name}.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def tiny_model(folder: Path) -> Path:
    """A random model with the small model's tokenizer, whose steps take a few milliseconds; made
    once.

    What it says has no meaning. Its vocabulary is as large as the ids of the prompts need.
    """
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from sterna.demo_model.small_model import default_cache_folder, ensure_small_model

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=65_536,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    tokenizer = ensure_small_model(default_cache_folder(os.environ), print)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    LlamaForCausalLM(config).save_pretrained(partial)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, partial / name)
    partial.rename(folder)
    return folder


_A10, _RTX4090 = "a10-llama-7b", "rtx4090-llama-3.1-8b"

_SESSIONS = ("--trace", "agents", "--divide-lengths", "16", "--divide-think-times", "16")
"""Think times are shorter for shorter runs: a session would last for minutes, mostly idle."""

_REASONING = ("--trace", "reasoning", "--divide-lengths", "10")
"""Outputs of 800 tokens in the mean and 3,276 at most, which fill the memory of an A10."""

CASES: Mapping[str, Case] = {
    each.name: each
    for each in (
        Case("M-M, 4 instances", _A10, 2.0, 4, ("--trace", "M-M"), 4.25, 600, 6_144),
        Case("ShareGPT, 4 instances", _A10, 2.0, 4, ("--trace", "ShareGPT"), 2.3, 460, 6_144),
        Case(
            "ShareGPT at a higher rate, 4 instances",
            *(_A10, 2.0, 4, ("--trace", "ShareGPT"), 2.6, 460, 6_144),
        ),
        Case("BurstGPT, 4 instances", _A10, 2.0, 4, ("--trace", "BurstGPT"), 2.55, 510, 6_144),
        Case("L-L, 4 instances", _A10, 2.0, 4, ("--trace", "L-L"), 2.5, 300, 4_096),
        Case("S-L, 4 instances", _A10, 2.0, 4, ("--trace", "S-L"), 4.5, 360, 4_096),
        Case("L-S, 4 instances", _A10, 2.0, 4, ("--trace", "L-S"), 11.0, 500, 4_096),
        Case("S-S, 4 instances", _A10, 1.0, 4, ("--trace", "S-S"), 32.0, 600, 2_048),
        Case("ShareGPT, 8 instances", _A10, 1.0, 8, ("--trace", "ShareGPT"), 4.9, 460, 6_144),
        Case(
            *("sessions, 4 instances", _RTX4090, 1.0, 4, _SESSIONS, 0.6, 800, 16_384),
            policies=(*POLICIES, *TUNED),
        ),
        Case(
            *("sessions, 8 instances", _RTX4090, 0.4, 8, _SESSIONS, 1.2, 600, 16_384),
            policies=(*POLICIES, "sglang-tuned"),
        ),
        Case("reasoning, 4 instances", _A10, 2.0, 4, _REASONING, 1.8, 250, 4_096),
        Case("reasoning, 8 instances", _A10, 1.5, 8, _REASONING, 4.0, 500, 4_096),
    )
}
"""All of them, by name. The rates are such that the simulator predicts some queuing with Llumnix's
rules on the paper's traces: at lower ones it predicts nearly the same of all policies. On S-L and
L-S it predicts some with round robin's only, and on S-S none at a rate that two cores carry. The
speeds are such that two fast cores carry the paper's traces: with ShareGPT on four, 2.0 took four
fifths of the time of two cores of an AMD EPYC with AVX-512, and all of two of an Intel Xeon at
2.6 GHz. Sessions on eight keep all of two busy at the hardware's own speed."""
