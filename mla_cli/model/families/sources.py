"""The families that can be converted: one line each."""

from __future__ import annotations

from mla_cli.model.families.base import Family
from mla_cli.model.families.bloom import BLOOM
from mla_cli.model.families.falcon import FALCON
from mla_cli.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from mla_cli.model.families.gpt2 import GPT2
from mla_cli.model.families.gpt_neox import GPT_NEOX
from mla_cli.model.families.gptj import GPTJ
from mla_cli.model.families.granite import GRANITE
from mla_cli.model.families.internlm2 import INTERNLM2
from mla_cli.model.families.llama import LLAMA, MISTRAL, QWEN2
from mla_cli.model.families.mixtures import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from mla_cli.model.families.mpt import MPT
from mla_cli.model.families.olmo import OLMO, OLMO2
from mla_cli.model.families.opt import OPT
from mla_cli.model.families.phi import PHI, PHI3
from mla_cli.model.families.qwen3 import QWEN3
from mla_cli.model.families.smollm3 import SMOLLM3
from mla_cli.model.families.stablelm import STABLELM
from mla_cli.model.families.starcoder2 import STARCODER2

SOURCES: tuple[Family, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, SMOLLM3, OLMO, OLMO2, GRANITE, STARCODER2, STABLELM, INTERNLM2,
    GPT2, GPT_NEOX, GPTJ, PHI, OPT, FALCON, BLOOM, MPT, MIXTRAL, QWEN2_MOE, QWEN3_MOE,
)  # fmt: skip
