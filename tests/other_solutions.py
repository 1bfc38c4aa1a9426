"""Right solutions of the first hour's functions in other words than the package's: learn mode must pass them.

`SOLUTIONS`: page -> sets of bodies, name -> body. Each set is one learner's notebook.
"""

SOLUTIONS = {
    "10_adamw": [
        # the paper's lines, with new tensors that are copied back
        {
            "adamw_update": """
beta1, beta2 = betas
exp_avg.copy_(beta1 * exp_avg + (1 - beta1) * grad)
exp_avg_sq.copy_(beta2 * exp_avg_sq + (1 - beta2) * grad**2)
m_hat = exp_avg / (1 - beta1**step)
v_hat = exp_avg_sq / (1 - beta2**step)
p -= lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * p)
""",
            "AdamW.step": """
if closure is None:
    loss = None
else:
    with torch.enable_grad():
        loss = closure()
for group in self.param_groups:
    settings = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay")}
    for p in (p for p in group["params"] if p.grad is not None):
        s = self.state[p]
        s["step"] = int(s.get("step", 0)) + 1
        for mean in ("exp_avg", "exp_avg_sq"):
            if mean not in s:
                s[mean] = torch.zeros_like(p)
        adamw_update(p, p.grad, s["exp_avg"], s["exp_avg_sq"], s["step"], **settings)
return loss
""",
        },
        # decay last but from the old weights, the means in place, both corrections in one factor
        {
            "adamw_update": """
b1, b2 = betas
old = p.clone()
exp_avg.mul_(b1).add_(grad, alpha=1 - b1)
exp_avg_sq.mul_(b2).add_(grad.square(), alpha=1 - b2)
root = (1 - b2**step) ** 0.5
p.sub_(exp_avg / (exp_avg_sq.sqrt() + eps * root) * (lr * root / (1 - b1**step)))
p.sub_(old, alpha=lr * weight_decay)
""",
            "AdamW.step": """
loss = None
if closure:
    with torch.enable_grad():
        loss = closure()
for group in self.param_groups:
    beta1, beta2 = group["betas"]
    for p in group["params"]:
        g = p.grad
        if g is not None:
            s = self.state[p]
            if len(s) == 0:
                s["step"] = 0
                s["exp_avg"] = torch.zeros_like(p)
                s["exp_avg_sq"] = torch.zeros_like(p)
            s["step"] = t = int(s["step"]) + 1
            m, v = s["exp_avg"], s["exp_avg_sq"]
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).add_(g * g, alpha=1 - beta2)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(group["lr"] * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"]))
return loss
""",
        },
    ],
    "11_schedule": [
        {
            "make_schedule": """
problems = schedule_problems(kind, max_steps, warmup_steps, final, cooldown)
if problems:
    raise UserError("; ".join(problems))
last = max_steps - 1
length = {"cosine": last, "constant": 0}.get(kind, round(cooldown * max_steps))
length = min(length, last - warmup_steps)

def rate(step):
    left = max(last - step, 0)
    if step < warmup_steps:
        return (1 + step) / (1 + warmup_steps)
    if left >= length:
        return 1.0
    part = left / length
    if kind == "cosine":
        part = math.sin(part * math.pi / 2) ** 2
    return 1.0 * part + final * (1 - part)

return rate
""",
        },
        {
            "make_schedule": """
if problems := schedule_problems(kind, max_steps, warmup_steps, final, cooldown):
    raise UserError(", ".join(problems))
end = max_steps - 1
down = end - warmup_steps if kind == "cosine" else round(cooldown * max_steps)
start = end if kind == "constant" else max(end - down, warmup_steps)

def multiplier(step):
    step = min(step, end)
    if step < warmup_steps:
        return 1 - (warmup_steps - step) / (warmup_steps + 1)
    if step <= start:
        return 1.0
    x = (step - start) / (end - start)
    if kind == "cosine":
        x = (1 - math.cos(math.pi * x)) / 2
    return 1 - (1 - final) * x

return multiplier
""",
        },
    ],
    "12_accumulate": [
        # clipping without torch's + 1e-6
        {
            "accumulate_gradients": """
_check(x, y, micro_batch_size, total)
count = (y != -100).sum() if total is None else total
rows = micro_batch_size if micro_batch_size is not None else max(x.shape[0], 1)
loss = torch.zeros((), dtype=torch.float32, device=x.device)
begin = 0
while begin < len(x):
    end = min(begin + rows, len(x))
    last = end == len(x)
    with contextlib.nullcontext() if last else no_sync():
        with autocast():
            logits, summed = model(x[begin:end], y[begin:end], reduction="sum")
            mean = summed / (count + (count == 0))
        scale(mean).backward()
    loss = loss + mean.detach().float()
    begin = end
return loss
""",
            "clip_gradients": """
if isinstance(parameters, torch.Tensor):
    parameters = (parameters,)
grads = [p.grad for p in parameters if p.grad is not None]
if not grads:
    return torch.tensor(0.0)
norm = torch.stack([getattr(g, "full_tensor", lambda g=g: g)().norm() for g in grads]).norm()
if max_norm > 0:
    factor = torch.clamp(max_norm / norm, max=1.0)
    for g in grads:
        g.mul_(factor)
return norm
""",
            "train_step": """
for p in model.parameters():
    p.grad = None
optimizer.zero_grad()
has = {id(p) for group in optimizer.param_groups for p in group["params"]}
mine = [p for p in model.parameters() if id(p) in has]
if scaler is None or not scaler.is_enabled():
    loss = accumulate_gradients(model, x, y, micro_batch_size, total, autocast=autocast, no_sync=no_sync)
    norm = clip_fn(clip) if clip_fn else clip_gradients(mine, clip)
    bad = torch.logical_not(torch.isfinite(norm))
    step_unless(optimizer, bad.to(torch.float32))
    return loss, norm
loss = accumulate_gradients(model, x, y, micro_batch_size, total, autocast, scaler.scale, no_sync)
scaler.unscale_(optimizer)
norm = clip_fn(clip) if clip_fn else clip_gradients(mine, clip)
scaler.step(optimizer)
scaler.update()
return loss, norm
""",
        },
        # the sum of squares, and the gradients divided at the end of each part
        {
            "accumulate_gradients": """
_check(x, y, micro_batch_size, total)
if total is None:
    total = y.ne(-100).sum()
total = total + (total == 0)
starts = list(range(0, len(x), micro_batch_size or max(len(x), 1)))
losses = []
for start in starts:
    part = slice(start, start + (micro_batch_size or len(x)))
    with contextlib.ExitStack() as stack:
        if start != starts[-1]:
            stack.enter_context(no_sync())
        with autocast():
            loss = model(x[part], y[part], reduction="sum")[1].div(total)
        scale(loss).backward()
    losses.append(loss.detach())
return torch.stack(losses).sum().float() if losses else torch.zeros((), device=x.device)
""",
            "clip_gradients": """
several = [parameters] if torch.is_tensor(parameters) else parameters
kept = [p for p in several if p.grad is not None]
squares = [p.grad.square().sum() for p in kept]
squares = [s.full_tensor() if hasattr(s, "full_tensor") else s for s in squares]
total = sum(squares, torch.zeros((), device=kept[0].device if kept else None)).sqrt()
if max_norm > 0:
    scale = torch.where(total > max_norm, max_norm / total, 1.0)
    for p in kept:
        p.grad *= scale.to(p.grad.dtype)
return total
""",
            "train_step": """
use_scaler = bool(scaler) and scaler.is_enabled()
optimizer.zero_grad()
extra = {"scale": scaler.scale} if use_scaler else {}
loss = accumulate_gradients(
    model, x, y, micro_batch_size=micro_batch_size, total=total, autocast=autocast, no_sync=no_sync, **extra
)
if use_scaler:
    scaler.unscale_(optimizer)
if clip_fn is None:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    norm = clip_gradients((p for p in model.parameters() if id(p) in mine), clip)
else:
    norm = clip_fn(clip)
if not use_scaler:
    step_unless(optimizer, 1.0 - torch.isfinite(norm).float())
else:
    scaler.step(optimizer)
    scaler.update()
return loss, norm
""",
        },
    ],
    "14_muon": [
        # the line of the docstring as it stands
        {
            "newton_schulz": """
if isinstance(coefficients[0], (int, float)):
    coefficients = [coefficients] * max(steps, 1)
X = G.to(dtype or newton_schulz_dtype(G.device, G.dtype))
tall = G.shape[-2] > G.shape[-1]
if tall:
    X = X.transpose(-1, -2)
X = X / X.square().sum((-1, -2), keepdim=True).sqrt().clamp(min=eps)
for i in range(steps):
    a, b, c = coefficients[i] if i < len(coefficients) else coefficients[-1]
    A = X @ X.transpose(-1, -2)
    X = a * X + b * (A @ X) + c * (A @ (A @ X))
return (X.transpose(-1, -2) if tall else X).to(G.dtype)
""",
        },
        # never turned: X^T X on the right
        {
            "newton_schulz": """
several = not isinstance(coefficients[0], (int, float))
dtype = dtype or newton_schulz_dtype(G.device, G.dtype)
X = G.to(dtype)
norm = torch.linalg.matrix_norm(X, keepdim=True)
X = X / torch.maximum(norm, torch.full_like(norm, eps))
for i in range(steps):
    a, b, c = coefficients[min(i, len(coefficients) - 1)] if several else coefficients
    A = X.mT @ X
    X = X @ (a * torch.eye(A.shape[-1], dtype=dtype, device=X.device) + b * A + c * A @ A)
return X.to(G.dtype)
""",
        },
    ],
    "06_model": [
        # as a learner writes it who has read Hugging Face's rotate_half
        {
            "apply_rope": """
cos, sin = (torch.cat((t, t), dim=-1) for t in rope.to(x.dtype))
half = x.shape[-1] // 2
return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
""",
            "Attention.forward": """
c = self.config
if c.position == "rope" and rope is None:
    raise UserError("no rope was given: give rope_table(block_size, head_dim, rope_theta)[:, :T]")
B, T, _ = x.shape
D, n, m = c.head_dim, c.n_head, c.kv_heads
q, k, v = self.c_attn(x).split([n * D, m * D, m * D], dim=-1)
q = q.reshape(B, T, n, D).transpose(1, 2)
k = k.reshape(B, T, m, D).transpose(1, 2)
v = v.reshape(B, T, m, D).transpose(1, 2)
if rope is not None:
    q = apply_rope(q, rope)
    k = apply_rope(k, rope)
if c.qk_norm:
    q, k = (F.rms_norm(t, (D,), eps=c.norm_eps) for t in (q, k))
if cache is not None:
    k, v = cache.extend(self.layer, k, v)
y = attention(q, k, v, mask=mask, impl=self.impl, dropout=c.dropout * self.training)
y = y.transpose(1, 2).flatten(2)
return drop(self.c_proj(y), c.dropout, self.training)
""",
        },
        # the norm before the rotation, which keeps lengths; RMSNorm by hand; pairs as complex numbers
        {
            "apply_rope": """
wide = torch.promote_types(x.dtype, torch.float32)
real, imaginary = x.to(wide).chunk(2, dim=-1)
turned = torch.complex(real, imaginary) * torch.complex(*rope.to(wide))
return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)
""",
            "Attention.forward": """
cfg = self.config
if rope is None and cfg.position == "rope":
    raise UserError("give rope_table(block_size, head_dim, rope_theta)[:, :T]")
n, m, d = cfg.n_head, cfg.kv_heads, cfg.head_dim
heads = self.c_attn(x).unflatten(-1, (n + 2 * m, d)).permute(0, 2, 1, 3)
q, k, v = heads[:, :n], heads[:, n : n + m], heads[:, n + m :]
if cfg.qk_norm:
    def unit(t):
        return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + cfg.norm_eps)
    q, k = unit(q), unit(k)
if rope is not None:
    k = apply_rope(k, rope)
    q = apply_rope(q, rope)
if cache is not None:
    k, v = cache.extend(self.layer, k, v)
p = cfg.dropout if self.training else 0.0
out = attention(q, k, v, dropout=p, mask=mask, impl=self.impl)
out = self.c_proj(out.permute(0, 2, 1, 3).flatten(-2))
return drop(out, cfg.dropout, self.training)
""",
        },
    ],
}
