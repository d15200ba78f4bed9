"""Train a Llama, or another causal language model of transformers, on text, with HuggingFace Accelerate.

    accelerate launch training_scripts/train_llama.py
    accelerate launch training_scripts/train_llama.py --model llama2-7b --dataset_name Salesforce/wikitext \
        --dataset_config_name wikitext-103-raw-v1 --tokenizer meta-llama/Llama-2-7b-hf --block_size 4096
    accelerate launch training_scripts/train_llama.py --pretrained folder/of/a/model --train_dir folder/of/text/files

Without a data set it learns CPython's own documentation, a byte at a time; nothing is downloaded.
"""

import argparse
import math
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from common import (
    Progress,
    RunLog,
    add_training_arguments,
    batch_size_per_process,
    fraction,
    make_accelerator,
    make_optimizer,
    make_scheduler,
    model_config_folder,
    number_of_steps,
    parse_arguments,
    positive,
    resume,
    save_checkpoint,
)
from datasets import Dataset, DatasetDict
from splits import check_columns, check_sizes, load_splits
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, default_data_collator


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="llama2-7b-tiny", help="a folder with config.json, or a name in zoo/configs")
    parser.add_argument("--pretrained", help="start from these weights instead: a local folder, or a name of the hub")
    parser.add_argument(
        "--tokenizer", help="a local folder or a name of the hub; default: that of --pretrained, or bytes"
    )
    parser.add_argument("--dataset_name", help="a data set of the hub with text")
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--train_dir", help="a local folder of .txt files, or train/ and validation/ with these")
    parser.add_argument("--text_column", default="text")
    parser.add_argument(
        "--eval_fraction", type=fraction, default=0.1, help="held out where there is no validation split"
    )
    parser.add_argument("--block_size", type=positive, default=128, help="tokens of one training item")
    add_training_arguments(parser, output_dir="outputs/train_llama", train_batch_size=16)
    return parse_arguments(parser)


# -- data --------------------------------------------------------------------------------------------------------------


def load_texts(args):
    """Rows of text, with the splits `train` and, but for a single text, `validation`."""
    if args.dataset_name is not None or args.train_dir is not None:
        texts = load_splits(args, "text", sample_by="document")
        check_columns(texts["train"], args.text_column)
    else:
        from pydoc_data.topics import topics

        texts = DatasetDict(train=Dataset.from_dict({args.text_column: sorted(set(topics.values()))}))
    if "validation" not in texts and len(texts["train"]) > 1:
        split = texts["train"].train_test_split(args.eval_fraction, seed=0)
        texts = DatasetDict(train=split["train"], validation=split["test"])
    return DatasetDict({name: texts[name] for name in ("train", "validation") if name in texts})


def load_blocks(args, tokenizer):
    """Training and evaluation items: the tokens of all texts one after the other, cut into pieces of one length."""

    def tokenize(rows):
        return tokenizer(rows[args.text_column], return_attention_mask=False)

    def cut(rows):
        tokens = list(chain.from_iterable(rows["input_ids"]))
        blocks = [tokens[i : i + args.block_size] for i in range(0, len(tokens) - args.block_size + 1, args.block_size)]
        return {"input_ids": blocks, "labels": blocks}

    def first(blocks, count):
        return blocks if count is None else blocks.select(range(min(count, len(blocks))))

    texts = load_texts(args)
    tokens = texts.map(tokenize, batched=True, remove_columns=texts["train"].column_names, desc="tokenize")
    blocks = tokens.map(cut, batched=True, remove_columns=["input_ids"], desc="cut into blocks")
    if "validation" not in blocks:  # of a single text, the end is held out
        count = math.ceil(len(blocks["train"]) * args.eval_fraction)
        border = len(blocks["train"]) - count
        blocks["validation"] = blocks["train"].select(range(border, border + count))
        blocks["train"] = blocks["train"].select(range(border))
    return first(blocks["train"], args.max_train_samples), first(blocks["validation"], args.max_eval_samples)


# -- model -------------------------------------------------------------------------------------------------------------


def load_tokenizer(args):
    name = args.tokenizer or args.pretrained
    # Byte by byte: this one needs no files.
    return ByT5Tokenizer() if name is None else AutoTokenizer.from_pretrained(name)


def build_model(args, tokenizer):
    if args.pretrained is not None:
        model = AutoModelForCausalLM.from_pretrained(args.pretrained)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_config_folder(args.model)))
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    model.config.use_cache = False
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@torch.no_grad()
def evaluate(model, dataloader, accelerator):
    """Mean loss per token and perplexity; every block counts once, however many processes share the work."""
    model.eval()
    loss_sum, num_blocks = 0.0, 0
    for batch in dataloader:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        token_losses = F.cross_entropy(logits.transpose(1, 2).float(), batch["labels"][:, 1:], reduction="none")
        block_losses = accelerator.gather_for_metrics(token_losses.mean(dim=1))
        loss_sum += block_losses.sum().item()
        num_blocks += len(block_losses)
    model.train()
    loss = loss_sum / num_blocks
    return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "num_items": num_blocks}


# -- training ----------------------------------------------------------------------------------------------------------


def train(args, accelerator, prepared, progress, num_steps, steps_per_epoch):
    model, optimizer, scheduler, train_dataloader, eval_dataloader = prepared
    log = RunLog(accelerator, args, progress)
    model.train()
    while progress.step < num_steps:
        epoch, num_done = progress.position(args, steps_per_epoch)
        train_dataloader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(train_dataloader, num_done) if num_done else train_dataloader
        for batch in rest:
            grad_norm = None
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                lr = scheduler.get_last_lr()[0]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            log.add(loss, items=len(batch["input_ids"]), tokens=batch["input_ids"].numel())
            if not accelerator.sync_gradients:
                continue

            progress.step += 1
            log.step(progress.step, lr=lr, grad_norm=grad_norm)
            is_last = progress.step == num_steps
            with log.paused():
                if is_last or (args.eval_steps and progress.step % args.eval_steps == 0):
                    log.evaluation(progress.step, **evaluate(model, eval_dataloader, accelerator))
                if args.checkpointing_steps and progress.step % args.checkpointing_steps == 0:
                    save_checkpoint(accelerator, progress)
            if is_last:
                break
    log.summary()


def main():
    args = parse_args()
    accelerator = make_accelerator(args)
    set_seed(args.seed)

    tokenizer = load_tokenizer(args)
    with accelerator.main_process_first():  # the others find the tokens in the cache of `datasets`
        train_set, eval_set = load_blocks(args, tokenizer)
    check_sizes(train_set, eval_set)
    options = {"collate_fn": default_data_collator, "num_workers": args.num_workers}
    options["pin_memory"] = torch.cuda.is_available()
    batch_size = batch_size_per_process(args, accelerator)
    train_dataloader = DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True, **options)
    eval_dataloader = DataLoader(eval_set, batch_size=args.eval_batch_size, **options)

    model = build_model(args, tokenizer)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(
        f"{args.pretrained or args.model}: {num_parameters / 1e6:.1f} M parameters, {len(train_set)} blocks"
    )

    num_steps, steps_per_epoch = number_of_steps(args, accelerator, train_dataloader)
    optimizer = make_optimizer(model, args)
    scheduler = make_scheduler(optimizer, args, accelerator, num_steps)
    prepared = accelerator.prepare(model, optimizer, scheduler, train_dataloader, eval_dataloader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    resume(accelerator, args, progress)
    train(args, accelerator, prepared, progress, num_steps, steps_per_epoch)

    accelerator.wait_for_everyone()
    output_dir, model = Path(args.output_dir) / "model", prepared[0]
    accelerator.unwrap_model(model).save_pretrained(
        output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
