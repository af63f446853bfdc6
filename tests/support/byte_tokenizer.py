"""A tokenizer of one token a byte, so that counts and ids are plain to see. Its one special token is an end token."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.serving.tokenizer_files import TokenizerSettings

__all__ = ["END", "TEMPLATE", "byte_tokenizer"]

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
END = 256


def byte_tokenizer() -> Tokenizer:
    """With the chat template :data:`TEMPLATE`; :data:`END` is its end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, TokenizerSettings(named_tokens={"eos_token": "<end>"}, chat_templates={"default": TEMPLATE}))
