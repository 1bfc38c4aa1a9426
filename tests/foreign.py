"""Models as others publish them, at a size for tests, made with transformers and tokenizers."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "The state of the Union, and the Congress of 1790; the people's government thanks them. " * 30
ODD = "In 1790, don't  \n\n\n café naïve 日本語 😀👩‍👩‍👧\u3000x\u00a0y e\u0301\r\n\t<b> ﬁ 'twas he'll   "


def smollm_tokenizer(alphabet: list[str] | None = None) -> Tokenizer:
    "As SmolLM2's: byte-level BPE, digits alone, special tokens first, nothing around a text."
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    how = dict(vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([TEXT], trainers.BpeTrainer(**how))
    return made


def llama_tokenizer() -> Tokenizer:
    "As Llama 2's: SentencePiece with a space before the text, <0x0A> for other bytes, <s> before each text."
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *sorted(set(TEXT) - {" "})]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    before = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(before)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def save_folder(folder: Path, tokenizer: Tokenizer, model=None, **settings) -> Path:
    "A folder as `save_pretrained` leaves it."
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def smollm(folder: Path, rows: int = 320, seed: int = 0, **kw):
    "(folder, their model): grouped queries, tied embeddings, more rows than tokens; end of text has id 0."
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        **kw,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5) if p.dim() > 1 else p.add_(0.1 * torch.randn_like(p))
    names = dict(tokenizer_class="GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    return save_folder(folder, smollm_tokenizer(), model, **names), model
