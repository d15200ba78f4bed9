"""Train a small Llama from scratch on CPython's own documentation, with the Trainer of transformers.

An ordinary Trainer script: it runs with `python`, with `accelerate launch` on any number of processes, and, without
any change, as a pipeline:

    accelerate launch --config examples/pfeife.yaml examples/finetune_trainer.py

Nothing is downloaded: the text is `pydoc_data.topics` of the standard library, the tokenizer works on bytes.
"""

import argparse
import json
import random
from pydoc_data.topics import topics

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per process and forward pass")
    parser.add_argument("--seq_len", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--eval_samples", type=int, default=64, help="sequences held out for evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="outputs/finetune_trainer")
    parser.add_argument("--log_json", help="write the Trainer's log history, one JSON object a line, to this file")
    return parser.parse_args()


def load_sequences(tokenizer, seq_len):
    """Cut the documentation into sequences of whole lines, each at most `seq_len` tokens."""
    sequences = []
    for text in sorted(set(topics.values())):
        piece = ""
        for line in text.splitlines(keepends=True):
            if piece and len(piece) + len(line) >= seq_len:
                sequences.append(piece)
                piece = ""
            piece += line
        sequences.append(piece)
    random.Random(0).shuffle(sequences)
    return [{"input_ids": tokenizer(piece, truncation=True, max_length=seq_len)["input_ids"]} for piece in sequences]


def make_collate(pad_token_id, seq_len):
    """Pad on the right; padding is masked from attention and, by the label -100, from the loss."""

    def collate(samples):
        input_ids = torch.full((len(samples), seq_len), pad_token_id)
        labels = torch.full((len(samples), seq_len), -100)
        attention_mask = torch.zeros((len(samples), seq_len), dtype=torch.long)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            input_ids[row, :length] = torch.tensor(sample["input_ids"])
            labels[row, :length] = torch.tensor(sample["input_ids"])
            attention_mask[row, :length] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    return collate


@torch.no_grad()
def evaluate_plainly(model, samples, batch_size, collate):
    """What the Trainer calls evaluation loss, in one process: the mean over batches, weighted by their samples."""
    model.eval()
    loss_sum = 0.0
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        loss_sum += model(**collate(batch)).loss.item() * len(batch)
    return loss_sum / len(samples)


def main():
    args = parse_args()
    set_seed(args.seed)
    tokenizer = ByT5Tokenizer()
    sequences = load_sequences(tokenizer, args.seq_len)
    eval_set, train_set = sequences[: args.eval_samples], sequences[args.eval_samples :]
    collate = make_collate(tokenizer.pad_token_id, args.seq_len)

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 11 // 4,
        num_hidden_layers=args.num_layers,
        num_attention_heads=max(1, args.hidden_size // 64),
        num_key_value_heads=max(1, args.hidden_size // 64),
        max_position_embeddings=args.seq_len,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 10,
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 2),
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        seed=args.seed,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=collate,
    )
    trainer.train()
    eval_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()

    if trainer.is_world_process_zero():
        # What was saved is an ordinary checkpoint: load it in this one process and evaluate it on the same batches.
        # A batch is what all processes together take at once: the Trainer's loss is a mean over its tokens.
        reloaded = LlamaForCausalLM.from_pretrained(args.output_dir)
        batch_size = args.batch_size * trainer.accelerator.num_processes
        reloaded_loss = evaluate_plainly(reloaded, eval_set, batch_size, collate)
        print(f"evaluation loss {eval_loss:.6f}; after reloading {args.output_dir} {reloaded_loss:.6f}")
        if args.log_json:
            records = [*trainer.state.log_history, {"reloaded_eval_loss": reloaded_loss}]
            with open(args.log_json, "w") as log_file:
                log_file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
