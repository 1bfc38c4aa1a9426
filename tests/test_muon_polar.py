import torch

from tinygpt.muon import QUINTIC, newton_schulz
from tinygpt.muon_polar import polar_express


def test_polar_express_coefficients_are_the_published_ones_and_its_result_is_closer_to_orthogonal():
    published = [  # Amsel et al. 2025, before their safety factor
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ]
    g = torch.Generator().manual_seed(0)
    ours = torch.tensor(polar_express(5, safety=1.0)).double()
    torch.testing.assert_close(ours, torch.tensor(published).double(), rtol=1e-6, atol=0)
    U, V = (torch.linalg.qr(torch.randn(48, 48, generator=g, dtype=torch.float64))[0] for _ in range(2))
    G = U @ torch.diag(torch.logspace(0, -2.6, 48, dtype=torch.float64)) @ V.mT
    error, of_quintic = (
        (torch.linalg.svdvals(newton_schulz(G, coefficients=c)) - 1).abs().max()
        for c in (polar_express(), QUINTIC)
    )
    assert error < 0.5 * of_quintic
