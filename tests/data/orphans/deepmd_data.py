"""Make input.json and a system of 12 atoms, for a training of DeePMD-kit that takes seconds."""

import json
from pathlib import Path

import numpy as np

FRAMES, ATOMS, EDGE = 20, 12, 8.0
frames = Path("system") / "set.000"
frames.mkdir(parents=True, exist_ok=True)
generator = np.random.default_rng(0)
Path("system/type.raw").write_text("\n".join(str(atom % 2) for atom in range(ATOMS)) + "\n")
Path("system/type_map.raw").write_text("O\nH\n")
np.save(frames / "box.npy", np.tile(np.eye(3).ravel() * EDGE, (FRAMES, 1)))
np.save(frames / "coord.npy", generator.uniform(0, EDGE, (FRAMES, 3 * ATOMS)))
np.save(frames / "energy.npy", generator.normal(size=FRAMES))
np.save(frames / "force.npy", generator.normal(size=(FRAMES, 3 * ATOMS)))
descriptor = {"type": "se_e2_a", "sel": [12, 12], "rcut": 4.0, "rcut_smth": 0.5, "neuron": [4, 8], "seed": 1}
Path("input.json").write_text(
    json.dumps(
        {
            "model": {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": {"neuron": [16, 16], "seed": 1}},
            "learning_rate": {"type": "exp", "decay_steps": 10, "start_lr": 0.001, "stop_lr": 1e-5},
            "loss": {"type": "ener"},
            "training": {
                "training_data": {"systems": ["system"], "batch_size": 1},
                "numb_steps": 20,
                "seed": 1,
                "disp_file": "lcurve.out",
                "disp_freq": 5,
                "save_freq": 20,
            },
        }
    )
)
