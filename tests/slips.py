"""Wrong solutions: the bugs of the field and the usual slips, each put into one function.

`python -m tinygpt.learn` and `make teeth` see that the tests of the chapter catch them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Slip:
    "One wrong solution: a function in which a piece of text is replaced."

    module: str  # tinygpt.<module>
    function: str  # qualified name, "AdamW.step"
    old: str  # occurs exactly once in that function's source as exported
    new: str  # what a learner might write instead
    why: str  # the slip in a few words: "no bias correction"


SLIPS = [
    # 01
    Slip("floats", "FloatFormat.bias", "(self.exponent_bits - 1) - 1", "(self.exponent_bits - 1)", "bias one too large"),
    Slip("floats", "FloatFormat.max_code", '"nan": top - 1', '"nan": top - 2**self.mantissa_bits', "e4m3 loses its top exponent, as an IEEE format would"),
    Slip("floats", "FloatFormat.min_exponent", "1 - self.bias", "-self.bias", "subnormal numbers with exponent 0 instead of 1"),
    Slip("floats", "decode", "(exponent > 0) + mantissa", "1 + mantissa", "a leading 1 for subnormal numbers too"),
    Slip("floats", "decode", "(codes >> (fmt.bits - 1)) & 1 > 0", "codes < 0", "the sign is only seen in signed codes"),
    Slip("floats", "round_to", "torch.round(wide / spacing)", "(wide / spacing + 0.5).floor()", "halfway cases always go up"),
    Slip("floats", "round_to", "torch.round(wide / spacing)", "torch.trunc(wide / spacing)", "chops instead of rounding"),
    Slip("floats", "_exponent", "fmt.min_exponent, FP64.bias", "1 - FP64.bias, FP64.bias", "no subnormal spacing: numbers near 0 get ever finer"),
    Slip("floats", "_fit", "torch.full_like(y, beyond).copysign(y)", "torch.full_like(y, beyond)", "a negative overflow becomes +inf"),
    Slip("floats", "encode", "value.signbit().long()", "(value < 0).long()", "-0 loses its sign"),
    Slip("floats", "ulp", "x <= fmt.max", "x < fmt.max", "the largest number has no unit in the last place"),
    Slip("floats", "stochastic_round_to", "draw < steps - below", "draw < 0.5", "up or down by a fair coin"),
    Slip("floats", "stochastic_round_to", "steps.floor()", "steps.trunc()", "negative numbers always go towards 0"),
    # 02
    Slip("tokenizer", "Vocabulary.token_bytes",
         "len(b) for b", 'len(b.decode("utf-8", "replace").encode()) for b', "bytes counted through a string decode (nanochat)"),  # fmt: skip
    Slip("tokenizer", "Vocabulary.decode", 'errors="replace"', 'errors="ignore"', "broken bytes vanish"),
    Slip("tokenizer", "CharTokenizer.train", "sorted(set(text))", "dict.fromkeys(text)", "alphabet in the order of the text"),
    Slip("tokenizer", "ByteTokenizer.encode", "list(_utf8(text))", "list(map(ord, text))", "code points for bytes"),
    Slip("tokenizer", "merge_pair", "i += 1 + hit", "i += 1", "the second half of a merged pair stays"),
    Slip("tokenizer", "merges_to_vocab", "vocab[left] + vocab[right]", "vocab[right] + vocab[left]", "halves in the wrong order"),
    Slip("tokenizer", "train_bpe", "(-counts[pair], pair)", "-counts[pair]", "ties go to the pair that was seen first"),
    Slip("tokenizer", "train_bpe", "sign * freqs[i]", "sign", "a word counts once, however often it stands there"),
    Slip("tokenizer", "train_bpe", "vocab_size - 256 and", "vocab_size - 257 and", "one merge too few"),
    Slip("tokenizer", "BPETokenizer.train", "_texts(texts), vocab_size - 1, 8192", "_texts(texts), vocab_size, 8192", "eot is not counted in vocab_size"),
    Slip("tokenizer", "BPETokenizer.encode", "encode_ordinary(text)", 'encode(text, allowed_special="all")', "a text can contain the special token"),
    Slip("tokenizer", "BPETokenizer.encode_bytes", "self.single[ord(c) - 0xDC00]", "ord(c) - 0xDC00", "takes a byte for its id"),
    Slip("tokenizer", "pad_vocab", "-(-n // multiple) * multiple", "(n // multiple + 1) * multiple", "pads what needs no padding"),
    Slip("tokenizer_gpt2", "parse_vocab_bpe", "text.splitlines()[1:]", "text.splitlines()", "the version line becomes a merge"),
    Slip("tokenizer_gpt2", "parse_vocab_bpe", "bytes([b]) for b in order", "bytes([b]) for b in range(256)", "the single bytes in another order than GPT-2's"),
    Slip("tokenizer_gpt2", "parse_vocab_bpe", "256 + i - len(printable)", "256 + b", "unprintable bytes spelled by their value, not by their rank"),
    # 03
    Slip("corpus", "hold_out", "[d for i, d in enumerate(documents) if i not in val]", "list(documents)", "validation text is trained on"),
    Slip("corpus", "hold_out", "min(10, len(documents) - 1)", "10", "of few documents none is held out"),
    Slip("corpus", "Corpus.fingerprint", 'digest.update(len(raw).to_bytes(8, "little"))', "pass", "where a document ends does not count"),
    Slip("corpus", "read_text", 'path.read_bytes().decode("utf-8")', 'path.read_text(encoding="utf-8")', "line ends are changed"),
    Slip("corpus", "build_tokenizer", "corpus.train, vocab_size", "corpus.train + corpus.val, vocab_size", "the tokenizer has seen the validation text"),
    Slip("data", "token_dtype", '"<u2"', '"<i2"', "ids above 32767 become negative"),
    Slip("data", "write_token_data", "[tokenizer.eot, *ids]", "[*ids, tokenizer.eot]", "eot behind the document"),
    Slip("data", "write_token_data", "len(d.encode()) for d", "len(d) for d", "characters for bytes"),
    Slip("data", "Shards.__getitem__", "max(0, start - end + len(part))", "start - end + len(part)", "a slice over two files wraps around in the second"),
    Slip("data", "Shards.gather", 'side="right"', 'side="left"', "the first token of a file is looked for in the file before"),
    Slip("data", "read_windows", "length), -100", "length), 0", "padding is trained on"),
    Slip("data", "to_batch", 'if device.type == "cuda":', "if True:", "pinned memory asked for on a machine without CUDA (nanochat)"),
    Slip("data", "to_batch", "rows[:, 1:].contiguous()", "rows[:, :-1].contiguous()", "targets are the inputs"),
    Slip("data", "to_batch", ".clamp(min=0)", "", "-100 as an input id"),
    Slip("data", "check_ranks", "slice(rank * rows, (rank + 1) * rows)", "slice(0, rows)", "ranks overlap (nanoGPT #531)"),
    Slip("data", "RandomLoader.starts", "counter=[0, 0, 0, step]", "counter=[0, 0, 0, 0]", "every batch is the first"),
    Slip("data", "RandomLoader.starts", "len(self.tokens) - self.block_size,", "len(self.tokens) - self.block_size - 1,", "the last token is never a target"),
    Slip("data", "RandomLoader.load_state_dict", 'state["step"]', "0", "a resumed run sees its first data again (nanoGPT #467)"),
    Slip("data", "_open_split", "part.max() >= vocab_size", "part.max() > vocab_size", "the id vocab_size passes"),
    Slip("data_chunks", "Report.add", "< 3", "<= 3", "four places instead of three"),
    Slip("data_chunks", "read_jsonl", "skip * chunk_rows - 1", "skip * chunk_rows", "a row is lost on going on"),
    Slip("data_chunks", "_split_lines", "    if rest:", "    if False:", "a last line without a line end is lost"),
    Slip("data_chunks", "read_parquet", "-(-sizes[group] // chunk_rows)", "sizes[group] // chunk_rows", "the short last chunk of a row group is not counted"),
    Slip("data_chunks", "_unzstd", "decoder.unused_data", 'b""', "only the first frame is read"),
    Slip("data_documents", "is_held_out",
         'int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")',
         "hash(text) % 2**64",
         "Python's hash: another split in each process"),  # fmt: skip
    Slip("data_documents", "Documents.chunks", "chunk.index + 1, 0", "chunk.index, 0", "after a broken connection a chunk comes twice"),
    Slip("data_documents", "Documents.walk", "skip if number == file else 0", "skip", "chunks of every file are passed over"),
    Slip("data_documents", "choose_tokenizer", "left > 0 and not is_held_out(text, fraction)", "left > 0", "the tokenizer has seen the validation text"),
    Slip("data_pack", "StreamLane._next", "at + len(piece) - 1)", "at + len(piece))", "one token in each row is never an input (nanochat)"),
    Slip("data_pack", "StreamLane._next", "(2 if self.ends else self.length)", "self.length", "the tail of an epoch is dropped (build-nanogpt)"),
    Slip("data_pack", "pack_best_fit",
         "bisect_right(sizes, length - k) - 1", "bisect_right(sizes, length - k - 1) - 1", "a document that fits exactly is not taken"),  # fmt: skip
    Slip("data_pack", "pack_best_fit", "max(0, bisect_right(sizes, length - k) - 1)", "0", "the shortest next, not the one that fits best"),
    Slip("data_pack", "Lane.wants", ">= self.cursor[:2]", "> self.cursor[:2]", "the document at which a run stopped is lost"),
    Slip("data_shard", "permute", "todo = out >= n", "todo = out > n", "a place beyond the last"),
    Slip("data_shard", "permute", "repr(key)", "repr(key[:1])", "every epoch in one order"),
    Slip("data_shard", "ShardLoader.__init__",
         "-(-(len(tokens) - 1) // block_size)", "(len(tokens) - 1) // block_size", "the tail of the corpus is dropped (build-nanogpt)"),  # fmt: skip
    Slip("data_shard", "ShardLoader.starts",
         "places * self.block_size", "places * (self.block_size + 1)", "windows of T + 1 tokens share none: a pair in each is lost (nanochat)"),  # fmt: skip
    Slip("data_shard", "ShardLoader.load_state_dict", 'state["window"]', 'state["window"] % self.n_windows', "resumes in the first epoch's order (nanochat)"),
    Slip("data_shard", "ShardLoader.__next__", "+= self.batch_size", "+= len(starts)", "a rank counts its own rows only"),
    Slip("data_prepare", "tokenize_chunk", "len(text.encode())", "len(text)", "characters for bytes"),
    Slip("data_prepare", "ShardWriter.load_state_dict", "self.file.truncate(size)", "pass", "what was written after the state stays"),
    Slip("data_prepare", "ShardWriter.load_state_dict", "self.digest.update(block)", "pass", "the hash forgets what was there before"),
    Slip("data_prepare", "_write_shards", "chunk.index + 1", "chunk.index", "a chunk comes twice when a run goes on"),
    Slip("data_stream", "BatchMaker._deal", "self.val_fraction and is_held_out(text, self.val_fraction)", "False", "validation documents are trained on"),
    Slip("data_stream", "BatchMaker._deal", "row in lanes and lanes[row].wants(chunk, number)", "row in lanes", "what was given before a stop is given again"),
    Slip("data_stream", "BatchMaker.order", "key=[self.seed, epoch]", "key=[self.seed, 0]", "every epoch in one order (build-nanogpt)"),
    Slip("data_stream", "merge_states", "min(states", "max(states", "goes on where the quickest rank was"),
    Slip("data_stream", "make_loader", 'val_fraction=data.meta["val_fraction"]', "val_fraction=0.0", "validation documents are trained on"),
    # 04
    Slip("attention", "visible", "return ago >= 0 if", "return ago > 0 if", "a query does not see itself"),
    Slip("attention", "visible", "ago < window", "ago <= window", "window one too wide"),
    Slip("attention", "last_positions", "torch.arange(S - T, S, device=device)", "torch.arange(T, device=device)", "mask aligned top left"),
    Slip("attention", "naive_attention", "math.sqrt(q.size(-1))", "q.size(-1)", "divides by head_dim, not by its root"),
    Slip("attention", "naive_attention",
         "t.repeat_interleave(q.size(1) // t.size(1), dim=1)",
         "t.repeat(1, q.size(1) // t.size(1), 1, 1)",
         "query heads meet the wrong key heads"),  # fmt: skip
    Slip("attention", "naive_attention", "softmax(dim=-1,", "softmax(dim=-2,", "softmax over the queries"),
    Slip("attention", "_update", "l = l * correct + p.sum", "l = l + p.sum", "the running sum is not rescaled to the new maximum"),
    Slip("attention", "_tiles", "c.start > last - window", "c.start >= last - window", "one key too many at the edge of a window"),
    Slip("attention", "_tile_grads", "p * (dp - delta_i)", "p * dp", "the softmax's own gradient is left out"),
    Slip("attention", "tiled_forward",
         "keep = _keep(s.shape, dropout, seed + rows.start * k.size(2) + cols.start, s)",
         "keep = _keep(s.shape, dropout, seed, s)",
         "every tile drops the same places, and other ones than the backward"),  # fmt: skip
    Slip("attention", "tiled_backward", "(dq_i * scale)", "dq_i", "the scale is missing in dq"),
    Slip("attention", "fused_attention",
         "if causal and T == S and T > 1 and not narrow:",
         "if causal and T > 1 and not narrow:",
         "is_causal aligns the mask top left: a cached query sees the first keys only"),  # fmt: skip
    Slip("attention_triton", "_see", "ago < WINDOW", "ago <= WINDOW", "window one too wide"),
    Slip("attention_triton", "_forward_kernel", "l = l * correct + tl.sum(p, 1)", "l = l + tl.sum(p, 1)", "the running sum is not rescaled to the new maximum"),
    Slip("attention_triton", "_dkv_kernel",
         "(kv % n_kv_head) * GROUP + g", "(kv % n_kv_head) + g * n_kv_head", "key heads get the gradients of the wrong query heads"),  # fmt: skip
    Slip("attention_triton", "_tile_grad", "p * (dp - delta[:, None])", "p * dp", "the softmax's own gradient is left out"),
    # 05
    Slip("init", "weight_std", "(3 * fan_in) ** -0.5", "fan_in**-0.5", "the bound of a uniform distribution is not its deviation"),
    Slip("init", "weight_std", "(2 * n_layer) ** -0.5", "n_layer**-0.5", "a block adds to the stream twice"),
    Slip("init", "weight_std", 'role in ("residual", "head")', 'role == "residual"', "the head does not start at zero"),
    Slip("init", "weight_std", '"head": 1 / fan_in', '"head": fan_in**-0.5', "muP's head by the root of its fan-in"),
    Slip("init", "_draw", "bound = std * 3**0.5", "bound = std", "deviation taken for the bound"),
    Slip("init", "init_weights", "module.in_features", "module.out_features", "fan-out for fan-in"),
    Slip("init", "init_weights", '1.0 if p_name == "weight" else 0.0', "1.0", "biases of norms start at 1"),
    Slip("init", "init_weights", 'deviation if scheme == "torch" else 0.0', "deviation", "biases are drawn like weights"),
    Slip("init", "ActivationStats.__exit__", "hook.remove()", "pass", "goes on recording behind the block"),
    Slip("init", "_summary", "x.std(unbiased=False)", "x.var(unbiased=False)", "variance for deviation"),
    # 06
    Slip("model", "GPTConfig.hidden", "-(-8 * self.n_embd // (3 * 64)) * 64", "8 * self.n_embd // 3", "not rounded up to a multiple of 64"),
    Slip("model", "rope_table", "theta ** (-torch", "theta ** (torch", "frequencies grow instead of falling"),
    Slip("model", "apply_rope", "x.chunk(2, dim=-1)", "(x[..., ::2], x[..., 1::2])", "another library's rotary layout"),
    Slip("model", "apply_rope", "a * cos - b * sin", "a * cos + b * sin", "no rotation: wrong sign"),
    Slip("model", "KVCache.extend", "return self.k[layer, :, :, :end], self.v[layer, :, :, :end]", "return k, v", "the cache is written and never read"),
    Slip("model", "Attention.forward", "apply_rope(q, rope), apply_rope(k, rope)", "apply_rope(q, rope), k", "keys are not rotated"),
    Slip("model", "Attention.forward", "c.dropout if self.training else 0.0", "c.dropout", "attention drops weights in evaluation too"),
    Slip("model", "Attention.forward", "y.transpose(1, 2).reshape(B, T, C)", "y.reshape(B, T, C)", "forgotten transpose: heads and positions mixed"),
    Slip("model", "MLP.forward", 'F.gelu(h, approximate="tanh")', "F.gelu(h)", "the exact GELU instead of GPT-2's"),
    Slip("model", "MLP.forward", "F.silu(self.c_gate(x)) * h", "F.silu(h) * self.c_gate(x)", "gate and value swapped"),
    Slip("model", "make_norm", "nn.RMSNorm(c.n_embd, eps=c.norm_eps)", "nn.RMSNorm(c.n_embd)", "torch's own eps in RMSNorm"),
    Slip("model", "Block.forward", "x + self.mlp(self.ln_2(x))", "self.ln_2(x + self.mlp(x))", "the norm after the addition"),
    Slip("model", "token_loss", "(targets != -100).sum().clamp(min=1)", "targets.numel()", "ignored targets are counted"),
    Slip("model", "token_loss", ".sum().clamp(min=1)", ".sum()", "no targets: 0 / 0"),
    Slip("model", "token_loss", "logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits", "the loss of half-precision logits in half precision"),
    Slip("model", "GPT.init_weights",
         "self.rope.copy_(rope_table(self.config.block_size, self.config.head_dim, self.config.rope_theta))",
         "pass",
         "a buffer made by the meta device is never filled (nanochat)"),  # fmt: skip
    Slip("model", "GPT.features", "0 if cache is None else cache.length", "0", "positions begin again with each cached token"),
    Slip("model", "GPT.features", "self.ln_f(x)", "x", "no last norm"),
    Slip("model", "GPT.forward",
         "torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / c.logit_softcap)",
         "torch.tanh(logits)",
         "the cap is a factor only"),  # fmt: skip
    Slip("model", "GPT.num_params", 'p[: self.config.vocab_size] if n in ("wte.weight", "lm_head.weight") else p', "p", "rows of padding are counted"),
    Slip("model_ngram", "ngram_rows", "* 742_938_285 % (2**31 - 1)", "% (2**31 - 1)", "a sum for a hash: the order of the tokens does not count"),
    Slip("model_ngram", "TokenEmbedding.forward", "ids[:, 3 - n :]", "ids[:, : ids.shape[1] - 3 + n]", "the pair that ended one place before"),
    Slip("model_ngram", "TokenEmbedding.forward", "cache.last = ids[:, -2:]", "pass", "a cached token does not know those before it"),
    Slip("model_ngram", "TokenEmbedding.forward",
         "torch.cat((idx.new_zeros(len(idx), 2) if cache is None else cache.last, idx), dim=1)",
         "torch.cat((idx, idx.new_zeros(len(idx), 2)), dim=1)",
         "looks two tokens ahead"),  # fmt: skip
    Slip("model_hf", "_transposed", '"c_attn.weight", "c_proj.weight", "c_fc.weight"', '"c_attn.weight", "c_fc.weight"', "forgotten transpose of c_proj"),
    Slip("model_hf", "config_from_hf", 'float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))', "10000.0", "the file's rope_theta is not read"),
    Slip("model_hf", "config_from_hf", 'hf.get("rms_norm_eps", 1e-6)', "1e-5", "the file's rms_norm_eps is not read"),
    Slip("model_hf", "state_to_hf",
         "n * c.head_dim for n in (c.n_head, c.kv_heads, c.kv_heads)",
         "n * c.head_dim for n in (c.kv_heads, c.kv_heads, c.n_head)",
         "values first"),  # fmt: skip
    Slip("model_hf", "state_to_hf", 'p[: c.vocab_size] if name in ("wte.weight", "lm_head.weight") else p', "p", "rows of padding are exported"),
    # 07
    Slip("measure", "flops_by_part", "L * 4 * C * T", "L * 2 * C * T", "one of attention's two products"),
    Slip("measure", "flops_by_part", '(3 if c.mlp == "swiglu" else 2)', "2", "the gate is not counted"),
    Slip("measure", "flops_by_part", "(c.n_head + 2 * c.kv_heads)", "3 * c.n_head", "grouped keys and values counted in full"),
    Slip("measure", "flops_per_token", "(3 if training else 1)", "(2 if training else 1)", "the backward counted once"),
    Slip("measure", "StepMeter.read", "self.clock() - self.start", "self.clock()", "divides by a timestamp (litgpt)"),
    Slip("measure", "StepMeter.read", "self.restart()", "self.tokens = 0", "the time of earlier readings stays in"),
    Slip("measure", "StepMeter.pause", "self.start += self.clock() - began", "pass", "validation counts as training"),
    Slip("measure", "datasheet", "max(found, key=len)", "found[0]", "a card with a longer name is taken for another"),
    Slip("measure", "si", "x >= s", "x > s", "1000 without a prefix"),
    Slip("measure_memory", "param_counts", "(2 * c.n_layer + 1) * C", "2 * c.n_layer * C", "the last norm is not counted"),
    Slip("measure_memory", "state_bytes", "8 * sum", "4 * sum", "one number of state instead of two"),
    Slip("measure_memory", "activation_bytes", "loss = 4 * c.vocab_size", "loss = half * c.vocab_size", "log-probabilities in half precision"),
    Slip("measure_memory", "largest_batch", "return low", "return high", "the first that does not fit"),
    Slip("measure_plan", "Plan.seconds", "self.tokens / self.tokens_per_second", "self.tokens_per_second / self.tokens", "upside down"),
    Slip("measure_plan", "plan", "speed / flops_per_token(config)", "speed / flops_per_token(config, training=False)", "the FLOPs of the forward alone"),
    Slip("measure_plan", "_count", '"m": 1e6', '"m": 2**20', "M as 2**20"),
    # 08
    Slip("precision", "auto_dtype", "return torch.float16, ", "return torch.bfloat16, ", "bfloat16 on a GPU that has none"),
    Slip("precision", "choose_device", 'torch.device("mps"), "found', 'torch.device("cpu"), "found', "MPS treated as a CPU (nanoGPT)"),
    Slip("precision", "Policy.autocast",
         "dtype=self.dtype)", "dtype=torch.float16)", "config says bfloat16, autocast runs float16 (a published Llama trainer)"),  # fmt: skip
    Slip("precision", "Policy.autocast", "self.dtype == torch.float32", 'self.device.type == "cpu"', "autocast silently off on the CPU (nanoGPT)"),
    Slip("precision", "choose_policy", "scaler=pick == torch.float16", "scaler=False", "float16 without a loss scaler"),
    Slip("precision", "unscale_gradients", "scale.double().reciprocal().float()", "scale", "multiplies instead of dividing"),
    Slip("precision", "unscale_gradients", "~largest.isfinite().all()", "largest.isinf().any()", "a nan is overlooked"),
    Slip("precision", "next_scale", "good_steps + 1 == growth_interval", "good_steps == growth_interval", "grows one step late"),
    Slip("precision", "next_scale", "torch.where(overflow | grow, 0", "torch.where(grow, 0", "an overflow does not begin the count again"),
    Slip("precision", "LossScaler.unscale_", "if self.reduce is not None:", "if False:", "a rank skips its step and the others do not"),
    Slip("precision", "LossScaler.step", "return None if found_inf.item() else optimizer.step()", "return optimizer.step()", "steps with infinite gradients"),
    Slip("precision", "LossScaler.state_dict", "if not self.enabled:", "if True:", "the scaler's state is not in the checkpoint (nanoGPT, nanochat)"),
    Slip("precision", "LossScaler.load_state_dict",
         'torch.full_like(self._good_steps, state["_growth_tracker"])', "torch.zeros_like(self._good_steps)", "the count of good steps is lost"),  # fmt: skip
    # 09
    Slip("compile", "compile_model",
         "CompiledModel(model, say, backend=backend, **options)",
         "torch.compile(model, backend=backend, **options)",
         "a module with _orig_mod. in its keys (nanoGPT #325)"),  # fmt: skip
    Slip("compile", "compile_model", "6 * n_params * tokens", "n_params * tokens", "6 FLOPs per parameter and token taken for one"),
    Slip("compile", "compile_model", "least is None or tokens is not None", "tokens is not None", "a device without a figure is compared with None"),
    Slip("compile", "CompiledModel.__call__", "self.compiled = None", "pass", "tries to compile again in every step"),
    Slip("compile", "CompiledModel.__call__", "except TorchDynamoException as error:", "except Exception as error:", "swallows the model's own errors"),
    Slip("compile", "_Traffic.__torch_dispatch__", "if not func.is_view:", "if True:", "a view counted as traffic"),
    Slip("compile", "watch_compiles", "if not any(m is old for old in before):", "if True:", "what was compiled before is listed too"),
    # 10
    Slip("adamw", "adamw_update",
         "(exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)",
         "exp_avg_sq.sqrt().add_(eps) / (1 - beta2**step) ** 0.5",
         "eps before the bias correction (nanochat #304)"),  # fmt: skip
    Slip("adamw", "adamw_update", "lr / (1 - beta1**step)", "lr", "no bias correction of the mean"),
    Slip("adamw", "adamw_update", "/ (1 - beta2**step) ** 0.5", "/ (1 - beta2**step)", "no root of the second correction"),
    Slip("adamw", "adamw_update", "p.mul_(1 - lr * weight_decay)", "grad = grad.add(p, alpha=weight_decay)", "decay in the gradient: Adam with L2"),
    Slip("adamw", "adamw_update", "1 - lr * weight_decay", "1 - weight_decay", "decay without the learning rate"),
    Slip("adamw", "adamw_update", "exp_avg.lerp_(grad, 1 - beta1)", "exp_avg.lerp_(grad, beta1)", "old and new weighted the wrong way round"),
    Slip("adamw", "adamw_update", "addcmul_(grad, grad, value=1 - beta2)", "add_(grad, alpha=1 - beta2)", "the gradient is not squared"),
    Slip("adamw", "adamw_update", "value=-step_size", "value=step_size", "uphill"),
    Slip("adamw", "AdamW.step", "step=0, exp_avg", "step=1, exp_avg", "steps counted from 2"),
    Slip("adamw", "parameter_kinds", '"embedding" if p in embeddings else ', "", "embeddings are taken for matrices"),
    Slip("adamw", "param_groups", '{"vector": 0.0}', "{}", "biases and norms decay"),
    Slip("adamw", "make_adamw", "p.device.type for g", "p.device for g", "fused never on: a device is compared with a string (picotron)"),
    Slip("adamw", "apply_multipliers", 'lr * g["lr_multiplier"]', 'g["lr_multiplier"]', "the factor taken for the rate"),
    # 11
    Slip("schedule", "make_schedule", "(step + 1) / (warmup_steps + 1)", "step / warmup_steps", "learning rate 0 on the first step (a tiny Llama trainer)"),
    Slip("schedule", "make_schedule", "last = max_steps - 1", "last = max_steps", "the final rate is never reached"),
    Slip("schedule", "make_schedule", "0.5 * (1 + math.cos(math.pi * done))", "math.cos(math.pi / 2 * done)", "a quarter of a cosine"),
    Slip("schedule", "make_schedule", "final + (1 - final) * down", "max(final, down)", "cut off at the final rate instead of scaled to it"),
    Slip("schedule", "make_schedule", "min(step, last)", "step", "past the end the rate rises again"),
    Slip("schedule", "make_schedule", "max(warmup_steps, last - round(cooldown * max_steps))", "warmup_steps", "a trapezoid without a top"),
    Slip("schedule", "batch_ramp", "// (ramp_tokens * multiple) * multiple", "// ramp_tokens", "batches that do not divide"),
    Slip("schedule", "count_steps", "budget // batch", "-(-budget // batch)", "one step past the end"),
    Slip("schedule", "count_steps", "<= budget", "< budget", "the batch that fits exactly is left out"),
    Slip("schedule_finder", "find_lr", "model, optimizer = copy.deepcopy((model, optimizer))", "pass", "trains the model itself"),
    Slip("schedule_finder", "find_lr", "rate * top / tops[0]", "rate", "all groups get one rate"),
    Slip("schedule_finder", "find_lr", "(step / (steps - 1))", "(step / steps)", "the last rate is not the highest"),
    Slip("schedule_finder", "find_lr", "mean / (1 - smooth ** (step + 1))", "mean", "the running mean is not corrected for its start at zero"),
    # 12
    Slip("accumulate", "count_targets", "int((targets != -100).sum())", "targets.numel()", "ignored targets are counted"),
    Slip("accumulate", "accumulate_gradients",
         'model(xb, yb, reduction="sum")[1] / divisor',
         "model(xb, yb)[1] / len(parts)",
         "mean of micro-batch means (transformers and others, 2024)"),  # fmt: skip
    Slip("accumulate", "accumulate_gradients",
         "loss += part.detach().to(loss.dtype)",
         "loss = part.detach().to(loss.dtype)",
         "the logged loss is the last micro-step's (nanoGPT, nanochat, minimind)"),  # fmt: skip
    Slip("accumulate", "accumulate_gradients",
         "loss += part.detach().to(loss.dtype)", "loss = loss + part.to(loss.dtype)", "forgotten detach: the returned loss drags a graph along"),  # fmt: skip
    Slip("accumulate", "accumulate_gradients", "total + (total == 0)", "total", "a batch without any target: 0 / 0"),
    Slip("accumulate", "accumulate_gradients", "i < len(parts)", "i <= len(parts)", "gradients are never synchronised"),
    Slip("accumulate", "accumulate_gradients", "scale(part).backward()", "part.backward()", "the loss is not scaled"),
    Slip(
        "accumulate", "accumulate_gradients",
        """        with no_sync() if i < len(parts) else contextlib.nullcontext():  # DDP decides in forward whether backward shall synchronise
            with autocast():
                part = model(xb, yb, reduction="sum")[1] / divisor
            scale(part).backward()""",
        """        with autocast():
            part = model(xb, yb, reduction="sum")[1] / divisor
        with no_sync() if i < len(parts) else contextlib.nullcontext():
            scale(part).backward()""",
        "no_sync around backward only; DDP decides in forward (build-nanogpt)",
    ),
    Slip("accumulate", "clip_gradients",
         "nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)",
         "[nn.utils.clip_grad_norm_(p, max_norm) for p in parameters]",
         "each tensor clipped by its own norm"),  # fmt: skip
    Slip("accumulate", "clip_gradients", "if max_norm > 0:", "if max_norm >= 0:", "0 clips everything away"),
    Slip("accumulate", "gradient_noise_scale", "float(n) ** 2", "float(n)", "norms that are not squared"),
    Slip("accumulate", "gradient_noise_scale", "big - noise / big_size", "big", "the noise is left in the signal"),
    Slip("accumulate", "measure_noise_scale", "nn.utils.get_total_norm(sums) / k", "nn.utils.get_total_norm(sums)", "sum for mean"),
    Slip("accumulate_memory", "_Twice.__call__",
         "use_reentrant=False", "use_reentrant=False, preserve_rng_state=False", "the second run drops other activations"),  # fmt: skip
    Slip("accumulate_memory", "_chunk", "dz.masked_fill_(ignored[:, None], 0)", "pass", "ignored targets have a gradient"),
    Slip("accumulate_memory", "_chunk", "z[:, :V] = dz if slope is None else dz.mul_(slope)", "z[:, :V] = dz", "the slope of the cap is left out"),
    Slip("accumulate_memory", "_ChunkedLoss.backward", "(d * grad).to(dtype)", "d.to(dtype)", "what comes from behind is left out of the gradient"),
    Slip("accumulate_memory", "chunked_cross_entropy", ".sum().clamp(min=1)", ".sum()", "no targets: 0 / 0"),
    # 13
    Slip("ddp", "_Replica.__init__", "dist.broadcast(tensor.detach(), 0)", "pass", "every rank begins with other weights"),
    Slip("ddp", "_Replica.forward",
         "if self.sync and torch.is_grad_enabled():", "if torch.is_grad_enabled():", "gradients synced in every micro-step (minimind)"),  # fmt: skip
    Slip("ddp", "_Replica.all_reduce", "op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM", "sum for mean"),
    Slip("ddp", "_Replica.used_anywhere", "dist.ReduceOp.MAX", "dist.ReduceOp.MIN", "a gradient that one rank lacks is thrown away"),
    Slip("ddp", "Bucketed.unpack", "p.grad.copy_(grad.view_as(p))", "pass", "the averages do not go back"),
    Slip("ddp", "Bucketed.group", "groups, size = [*groups, []], 0", "groups = [*groups, []]", "a bucket for each tensor once the first is full"),
    Slip("ddp", "CountCollectives.__torch_dispatch__", "self.calls[name] += 1", "self.calls[name] = 1", "calls are not added up"),
    Slip("ddp", "no_sync",
         'model.no_sync() if hasattr(model, "no_sync") else nullcontext()', "nullcontext()", "gradients synced in every micro-step (minimind)"),  # fmt: skip
    Slip("ddp", "settle_buckets", "ddp.zero_grad(set_to_none=True)", "pass", "leaves gradients behind"),
    Slip("ddp", "settle_buckets", "ddp(x, y)[1].backward()", "ddp(x, y)", "no backward: torch rearranges its buckets after the first step"),
    Slip("ddp_demo", "train_together", "/ world.world_size  # ranks average", "# ranks average", "averaged gradients divided by the targets of all ranks"),
    Slip("ddp_demo", "train_together", "dist.all_reduce(loss, op=dist.ReduceOp.AVG)", "pass", "the logged loss is rank 0's alone"),
    Slip("ddp_launch", "World.is_main", "self.rank == 0", "self.local_rank == 0", "one main process on every machine"),
    Slip("ddp_launch", "_place", 'place["RANK"] < place["WORLD_SIZE"]', 'place["RANK"] <= place["WORLD_SIZE"]', "rank N of N passes"),
    Slip("ddp_launch", "_what_failed", "min(errors", "max(errors", "blames the last to fail"),
    Slip("ddp_launch", "check_world", "(world.world_size + 1) / 2", "(world.world_size - 1) / 2", "sum of the ranks from 0"),
    Slip("ddp_watchdog", "_Heart.look", 'rank != self.rank and self.state_of(rank) != "done"', "rank != self.rank", "a rank that is done is taken for dead"),
    Slip("ddp_watchdog", "_Heart.look", "if sign == self.seen[rank] else 0", "if sign == self.seen[rank] else self.silent[rank]", "silence is never forgotten"),
    Slip("ddp_watchdog", "_Heart._has_ended",
         'self.who[rank][0] != self.machine or os.name != "posix"', 'os.name != "posix"', "asks this machine for another machine's process"),  # fmt: skip
    Slip("ddp_watchdog", "Watchdog.__exit__", 'self.failed(" ".join', 'self.done() or (" ".join', "an error is told as a good end"),
    # 14
    Slip("muon", "newton_schulz_dtype", "torch.bfloat16 if hardware else torch.float32", "torch.bfloat16", "bfloat16 where the device has none (nanochat)"),
    Slip("muon", "newton_schulz", ".norm(dim=(-2, -1), keepdim=True)", ".norm()", "a stack divided by one norm"),
    Slip("muon", "newton_schulz", ".clamp(min=eps)", "", "a matrix of zeros becomes nan"),
    Slip("muon", "newton_schulz", "(X.mT if tall else X).reshape(G.shape)", "X.reshape(G.shape)", "a tall matrix is not transposed back"),
    Slip("muon", "newton_schulz", "beta=b, alpha=c", "beta=c, alpha=b", "coefficients swapped"),
    Slip("muon", "polar_express", "centre * b / s**3", "centre * b / s", "the safety factor without its power"),
    Slip("muon", "update_scale", "max(1, rows / cols)", "max(1, cols / rows)", "rows and columns swapped"),
    Slip("muon", "muon_update", "if nesterov else bufs", "if not nesterov else bufs", "Nesterov the wrong way round"),
    Slip("muon", "muon_update", "1 - lr * weight_decay", "1 - weight_decay", "decay without the learning rate"),
    Slip("muon", "muon_update", "alpha=-lr * update_scale", "alpha=lr * update_scale", "uphill"),
    Slip("muon", "Muon.step", "(part[0].shape, p.device, p.dtype)", "(part[0].numel(), p.device, p.dtype)", "grouped by numel: shapes mixed (nanochat)"),
    Slip("muon", "muon_groups",
         "rows = (c.n_head * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)",
         "rows = (c.n_head * c.head_dim, 2 * c.kv_heads * c.head_dim)",
         "keys and values orthogonalised together"),  # fmt: skip
    Slip("muon", "CombinedOptimizer._share", "o.state = self.state", "pass", "the state of the parts is not in the state dict"),
    Slip("muon", "matrix_owners", "min(range(world_size), key=load.__getitem__)", "i % world_size", "dealt in turn, not by size"),
    # 15
    Slip("zero_wire", "Bucket.finish", "part / self.wire.world_size if self.wire.world_size > 1 else part", "part", "sum for mean"),
    Slip("zero_wire", "Bucket.finish", "part if self.grad is None else self.grad.add_(part)", "part", "an earlier micro-step is forgotten"),
    Slip("zero_wire", "ShardedOptimizer.clip_gradients", "wait_all(self.wire.all_reduce(square))", "pass", "clipped by each rank's own norm (nanochat)"),
    Slip("zero_wire", "ShardedOptimizer.clip_gradients", ".square().sum()", ".sum()", "adds norms instead of their squares"),
    Slip("zero_wire", "ShardedOptimizer.load_state_dict",
         'group.update({key: value for key, value in saved.items() if key != "params"})', "pass", "rates and decay are not taken over"),  # fmt: skip
    Slip("zero", "_Flat.__init__",
         "self.low, self.high = min(wire.rank * size, count), min((wire.rank + 1) * size, count)",
         "self.low, self.high = wire.rank * (count // wire.world_size), (wire.rank + 1) * (count // wire.world_size)",
         "elements beyond a multiple of the world size are never updated (DistAdamW)"),  # fmt: skip
    Slip("zero", "_Flat.__init__", "-(-count // wire.world_size)", "count // wire.world_size + 1", "padded where nothing needs padding (Muon)"),
    Slip("zero", "_Flat.update", "self.steps[p] += 1", "self.steps[p] = 1", "the bias correction of the first step for ever"),
    Slip("zero", "_Flat.load", 'own[part] = state[p][name].flatten()[place].to(own)', "pass", "the moments are not loaded"),
    Slip("zero", "_Matrix.load",
         'self.buf.copy_(state[self.p]["momentum_buffer"]) if self.started else self.buf.zero_()',
         "self.buf.zero_()",
         "the momentum is not loaded"),  # fmt: skip
    Slip("zero", "_Round.update", 'group["split"] or [len(m.p)]', "[len(m.p)]", "queries, keys and values orthogonalised together"),
    # 16
    Slip("checkpoint", "set_rng_state", 'torch.set_rng_state(_tensor(state["cpu"]))', "pass", "torch's generator is not put back"),
    Slip("checkpoint", "set_rng_state",
         'dtype=np.uint32), pos, has_gauss, gauss', "dtype=np.uint32), 0, has_gauss, gauss", "numpy's place among its numbers is lost"),  # fmt: skip
    Slip("checkpoint", "save_checkpoint",
         "t.detach().cpu().contiguous()", "t.detach().cpu().half().contiguous()", "weights stored in half precision (minimind)"),  # fmt: skip
    Slip("checkpoint", "save_checkpoint", 'name.replace("_orig_mod.", "").removeprefix("module.")', "name", "_orig_mod. in the names (nanoGPT #325)"),
    Slip("checkpoint", "save_checkpoint",
         "atomic_path(folder) as tmp:\n        tmp.mkdir()",
         "contextmanager(lambda: (yield folder))() as tmp:\n        tmp.mkdir(parents=True)",
         "written in place: a crash leaves half a checkpoint"),  # fmt: skip
    Slip("checkpoint", "verify_checkpoint", "sha256_file(folder / name) != digest", "not (folder / name).stat().st_size", "hashes are not compared"),
    Slip("checkpoint", "rank_by_loss", "sorted(losses, key=losses.get)", "list(losses)[::-1]", "the best is the last one saved (nanoGPT)"),
    Slip("checkpoint", "rank_by_loss",
         "isinstance(loss, (int, float)) and math.isfinite(loss)", "isinstance(loss, (int, float))", "a loss of nan can be the best"),  # fmt: skip
    Slip("checkpoint", "find_checkpoint", "checkpoints(path)[::-1]", "checkpoints(path)", "the oldest instead of the newest"),
    Slip("checkpoint", "prune", "*(rank_by_loss(run)[:1] if best else ())", "*()", "the best one is removed"),
    Slip("checkpoint", "load_model", "model.to(device).eval()", "model.to(device)", "dropout stays on"),
    Slip("checkpoint", "load_training_state", 'state["rng"][rank]', 'state["rng"][0]', "every rank gets the generators of rank 0"),
    Slip("checkpoint_proof", "load_run", 'run.step = state["step"]', 'run.step = state["step"] + 1', "a step is skipped"),
    Slip("checkpoint_proof", "load_run", "run.scaler.load_state_dict(state[\"scaler\"])", "pass", "the scaler begins anew (nanoGPT, nanochat)"),
    Slip("checkpoint_proof", "same_state", "len(a) == len(b) and all(map(same_state, a, b))", "all(map(same_state, a, b))", "a list equals its own beginning"),
    # 17
    Slip("evaluate", "eval_windows", "-(-(len(tokens) - 1) // block_size)", "(len(tokens) - 1) // block_size", "the tail of the text is left out"),
    Slip("evaluate", "eval_batch", ".astype(np.int64), -100)", ".astype(np.int64), 0)", "padding is scored"),
    Slip("evaluate", "Score.bits_per_byte", " / math.log(2)", "", "nats for bits"),
    Slip("evaluate", "Score.bits_per_byte", "max(self.bytes, 1)", "max(self.tokens, 1)", "bits per token"),
    Slip("evaluate", "eval_rows",
         "np.linspace(0, n_rows - 1, count).round().astype(np.int64)",
         "np.random.randint(n_rows, size=count)",
         "random validation windows (nanoGPT)"),  # fmt: skip
    Slip("evaluate", "eval_rows", "np.linspace(0, n_rows - 1, count).round().astype(np.int64)", "np.arange(count)", "only the beginning of the text"),
    Slip("evaluate", "score_rows", "dist.all_reduce(table)", "pass", "each rank scores its own rows only (nanoGPT, litgpt)"),
    Slip("evaluate", "score_rows", "model.train(training)", "pass", "the model is left in eval mode"),
    Slip("evaluate", "score_rows", "token_bytes[y.clamp(min=0).numpy()]", "token_bytes[x.numpy()]", "bytes of the inputs, not of the targets"),
    Slip("evaluate", "ratio_interval", "(total - ratio * count) ** 2", "(total - total.mean()) ** 2", "spread of the totals, not of the ratio"),
    Slip("evaluate", "ratio_interval", "0.5 + level / 2", "level", "one-sided quantile"),
    Slip("evaluate", "row_documents", ".clip(min=1) - 1", "", "documents counted from 1"),
    Slip("evaluate_tasks", "encode_pair",
         "continuation, context = context[len(bare) :] + continuation, bare", "context = bare", "the space at the end of the context is lost"),  # fmt: skip
    Slip("evaluate_tasks", "pair_windows",
         "ids[max(0, done - block_size) : done + 1]", "ids[max(0, done - block_size) : done]", "the last id of a window is not scored"),  # fmt: skip
    Slip("evaluate_tasks", "continuation_losses", "(logits.argmax(-1).cpu() != y) & (y != -100)", "logits.argmax(-1).cpu() != y", "padding counts as wrong"),
    Slip("evaluate_tasks", "wilson_interval", "p * (1 - p) * slack", "p * (1 - p)", "the spread of one draw"),
    Slip("evaluate_tasks", "score_items", "(losses / characters).argmin(1)", "losses.argmin(1)", "acc_norm without the norm"),
    Slip("evaluate_tasks", "storycloze_item", 'int(row["AnswerRightEnding"]) - 1', 'int(row["AnswerRightEnding"])', "labels counted from 1"),
    Slip("evaluate_export", "merge_pairs", "key=lambda s: (ranks[s[0]], ranks[s[1]])", "key=lambda s: -ranks[s[0]]", "merges in another order"),
    Slip("evaluate_export", "write_until",
         "text[: min([len(text), *(text.index(stop) for stop in until if stop in text)])]", "text", "the end mark stays in the text"),  # fmt: skip
    Slip("evaluate_export", "write_until",
         "(ids + new)[-model.config.block_size :]", "(ids + new)[: model.config.block_size]", "a long text is cropped on the wrong side"),  # fmt: skip
    # 18
    Slip("generate", "sampling_probs",
         "ranked[..., top_k:] = -torch.inf",
         "torch.full_like(ranked[..., top_k:], -torch.inf)",
         "top-k computed and discarded (a course's reference code)"),  # fmt: skip
    Slip("generate", "sampling_probs", "if 0 < top_k < ranked.shape[-1]:", "if top_k < ranked.shape[-1]:", "top_k = 0 leaves nothing (nanochat)"),
    Slip("generate", "sampling_probs", "before >= top_p", "probs.cumsum(-1) > top_p", "the token that completes top_p is dropped"),
    Slip("generate", "sampling_probs", "probs = probs / probs.sum(-1, keepdim=True)", "pass", "what is left does not add up to 1"),
    Slip("generate", "sampling_probs", "logits / temperature", "logits * temperature", "hot and cold swapped"),
    Slip("generate", "sampling_probs", "torch.zeros_like(probs).scatter(-1, order, probs)", "probs", "ranks taken for ids"),
    Slip("generate", "context_start", "-(-(n - block_size) // hop) * hop", "(n - block_size) // hop * hop", "rounds down: more tokens are left than fit"),
    Slip("generate", "NextLogits.__call__",
         "if self.cache is None or start != self.begin:", "if self.cache is None:", "cached decoding ignores the sliding window (nanochat)"),  # fmt: skip
    Slip("generate", "generate_tokens",
         "torch.multinomial(probs, 1, generator=generator)",
         "torch.multinomial(probs[:1], 1, generator=generator).expand(len(probs), 1)",
         "all samples share their tokens (nanochat)"),  # fmt: skip
    Slip("generate", "generate_tokens", "model.train(training)", "pass", "the model is left in eval mode"),
    Slip("generate", "generate_batch", "g.manual_seed(seed + r)", "g.manual_seed(seed)", "equal prompts get equal texts (nanochat)"),
    Slip("generate", "generate_batch", "if token != eot:", "if True:", "eot is part of the text"),
    Slip("generate", "stream_text", "decoder.decode(tokenizer.decode_bytes([token.item()]))", "tokenizer.decode([token.item()])", "half characters are shown"),
    # 19
    Slip("config", "TrainConfig.problems", "not 1 <= d.micro_batch_size <= d.batch_size", "d.micro_batch_size > d.batch_size", "0 rows a micro-step pass"),
    Slip("config", "_fits", "isinstance(value, (int, float)) and not isinstance(value, bool)", "isinstance(value, (int, float))", "true passes as a number"),
    Slip("config", "config_from_dict", "copy.deepcopy(base) if base", "base if base", "the caller's config is changed"),
    Slip("config", "config_from_dict", "tuple(value) if isinstance(value, list) else value", "value", "a tuple comes back as a list"),
    Slip("parallel", "any_rank", "dist.ReduceOp.MAX", "dist.ReduceOp.MIN", "all ranks must see the signal"),
    Slip("parallel", "Single.share_of_targets",
         "return count / self.world.world_size", "return count", "divided by the targets of all ranks, and averaged once more"),  # fmt: skip
    Slip("parallel", "Single.mean", "values /= self.world.world_size", "pass", "sum for mean: the logged loss grows with the ranks"),
    Slip("parallel", "Single.mean", "dist.all_reduce(values)", "pass", "the logged loss is rank 0's alone (nanoGPT, nanochat, minimind)"),
    Slip("presets", "preset", "PRESETS[name]()", 'vars(PRESETS[name]).setdefault("made", PRESETS[name]())', "one copy for all"),
    Slip("presets", "parse_arguments",
         'base.run.out, base.run.name = str(Path(sources["--resume"]).parent), Path(sources["--resume"]).name',
         "pass",
         "a run that was moved writes to its old place"),  # fmt: skip
    Slip("presets", "parse_arguments", "if len(named) > 1:", "if False:", "two places to start from, and one is forgotten without a word"),
    Slip("report", "RunLog.__init__", '< from_step + ("val_loss" in line)', "<= from_step", "a step is in the metrics twice after a resume"),
    Slip("report", "smooth", "mean / (1 - weight**i)", "mean", "the running mean is not corrected for its start at zero"),
    Slip("report", "read_metrics",
         "except ValueError:\n            break", "except ZeroDivisionError:\n            break", "a last line that was cut off ends the run"),  # fmt: skip
    Slip("run_setup", "check_folder", "if not overwrite:", "if False:", "an earlier run is deleted unasked"),
    Slip("run_setup", "initial_model",
         't[:T] if name == "wpe.weight" else t', 't[-T:] if name == "wpe.weight" else t', "the last positions instead of the first"),  # fmt: skip
    Slip("run_setup", "check_vocabulary",
         "model is not None and model.config.vocab_size != data.tokenizer.n_vocab", "False", "weights and data of two vocabularies"),  # fmt: skip
    Slip("train", "train", "copy.deepcopy(config.check())", "config.check()", "the caller's config is changed"),
    Slip("train", "train", "finished = step == o.max_steps", "finished = step > o.max_steps", "one step past the end (nanoGPT)"),
    Slip("train", "train", "elif torch.isfinite(norm):", "else:", "steps with gradients that are not finite"),
    Slip("train", "train", "top * schedule(step)", "top * schedule(step + 1)", "the rate of the next step"),
    Slip("train", "train", "loader.load_state_dict(state[\"loader\"])", "None", "a resumed run sees its first data again (nanoGPT #467)"),
    Slip("train", "train", "pending = []", "pending = pending", "every step is logged again and again"),
]
