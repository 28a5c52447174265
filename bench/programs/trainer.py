"""Train a small language model, made from a config, with Trainer of Hugging Face."""

import tempfile

import torch
from timing import Steps
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

STEPS = Steps()
TOKENS, WORDS, BATCH = 32, 2048, 2


class Clock(TrainerCallback):
    """Note each step with the loss that Trainer logs."""

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            STEPS.done(logs["loss"])


class Rows(torch.utils.data.Dataset):
    """Sentences that count upwards."""

    def __len__(self):
        return 4 * BATCH * STEPS.total

    def __getitem__(self, number):
        words = (torch.arange(TOKENS) + 7 * number) % WORDS
        return {"input_ids": words, "labels": words}


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=256, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS.total,
        logging_steps=1,
        logging_strategy="steps",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Clock()]).train()
