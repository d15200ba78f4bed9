"""Train a small Llama from scratch on CPython's own documentation, with HuggingFace Accelerate.

An ordinary Accelerate script: it runs with `python`, with `accelerate launch` on any number of processes, and, without
any change, as a pipeline:

    accelerate launch --config examples/pfeife.yaml examples/finetune_llama.py

Nothing is downloaded: the text is `pydoc_data.topics` of the standard library, the tokenizer works on bytes.
"""

import argparse
import json
import random
import time
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per process and forward pass")
    parser.add_argument("--seq_len", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=9)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--eval_samples", type=int, default=60, help="sequences held out for evaluation")
    parser.add_argument("--tie_embeddings", action="store_true", help="share the input and output embedding")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="outputs/finetune_llama")
    parser.add_argument("--log_json", help="also write one JSON object per step and evaluation to this file")
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
    return [tokenizer(piece, truncation=True, max_length=seq_len)["input_ids"] for piece in sequences]


def make_collate(pad_token_id, seq_len):
    """Pad on the right; padding is masked from attention and, by the label -100, from the loss."""

    def collate(sequences):
        input_ids = torch.full((len(sequences), seq_len), pad_token_id)
        labels = torch.full((len(sequences), seq_len), -100)
        attention_mask = torch.zeros((len(sequences), seq_len), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            input_ids[row, : len(sequence)] = torch.tensor(sequence)
            labels[row, : len(sequence)] = torch.tensor(sequence)
            attention_mask[row, : len(sequence)] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    return collate


@torch.no_grad()
def evaluate(model, dataloader, gather=lambda values: values):
    """Mean loss per token; every sequence counts once, however many processes share the work."""
    model.eval()
    loss_sum, num_tokens = 0.0, 0
    for batch in dataloader:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        targets = batch["labels"][:, 1:]
        token_losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), targets, reduction="none")
        sequence_losses, sequence_tokens = gather((token_losses.sum(dim=1), (targets != -100).sum(dim=1)))
        loss_sum += sequence_losses.sum().item()
        num_tokens += sequence_tokens.sum().item()
    model.train()
    return loss_sum / num_tokens


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    history = []

    tokenizer = ByT5Tokenizer()
    sequences = load_sequences(tokenizer, args.seq_len)
    eval_set, train_set = sequences[: args.eval_samples], sequences[args.eval_samples :]
    collate = make_collate(tokenizer.pad_token_id, args.seq_len)
    train_dataloader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    eval_dataloader = DataLoader(eval_set, batch_size=args.batch_size, collate_fn=collate)

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 11 // 4,
        num_hidden_layers=args.num_layers,
        num_attention_heads=max(1, args.hidden_size // 64),
        num_key_value_heads=max(1, args.hidden_size // 64),
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=args.tie_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    accelerator.print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {len(train_set)} sequences"
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    # A prepared scheduler advances once per process and step.
    scheduler = get_cosine_schedule_with_warmup(
        optimizer,
        num_warmup_steps=args.steps // 10 * accelerator.num_processes,
        num_training_steps=args.steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )

    model.train()
    step, losses, num_tokens = 0, [], 0
    step_start = time.perf_counter()
    while step < args.steps:
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(outputs.loss.item())
            num_tokens += batch["attention_mask"].sum().item() * accelerator.num_processes

            if accelerator.sync_gradients:
                step += 1
                seconds = time.perf_counter() - step_start
                loss, tokens_per_s = sum(losses) / len(losses), num_tokens / seconds
                lr = scheduler.get_last_lr()[0]
                accelerator.print(f"step {step:4d}  loss {loss:.4f}  lr {lr:.2e}  {tokens_per_s:7.0f} tokens/s")
                history.append(dict(kind="step", step=step, loss=loss, learning_rate=lr, tokens_per_s=tokens_per_s))
                losses, num_tokens = [], 0
                step_start = time.perf_counter()
                if step == args.steps:
                    break

    eval_loss = evaluate(model, eval_dataloader, accelerator.gather_for_metrics)
    accelerator.print(f"evaluation loss {eval_loss:.6f}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )

    if accelerator.is_main_process:
        # What was saved is an ordinary checkpoint: load it in this one process and evaluate it on the same batches.
        reloaded = LlamaForCausalLM.from_pretrained(args.output_dir)
        reloaded_loss = evaluate(reloaded, DataLoader(eval_set, batch_size=args.batch_size, collate_fn=collate))
        print(f"saved to {args.output_dir}; evaluation loss after reloading it {reloaded_loss:.6f}")
        history.append(dict(kind="eval", loss=eval_loss, reloaded_loss=reloaded_loss, num_samples=len(eval_set)))
        if args.log_json:
            with open(args.log_json, "w") as log_file:
                log_file.writelines(json.dumps(record) + "\n" for record in history)
    accelerator.end_training()


if __name__ == "__main__":
    main()
