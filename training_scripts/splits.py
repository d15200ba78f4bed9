"""Splits of a data set of the hub or of a local folder, and an end with a word where they cannot be trained on.

Ignores: what is in a row; each script makes its own items.
"""


def load_splits(args, kind, **options):
    """The splits of the hub's data set or of the local folder that was asked for, the one to train on among them."""
    # Imported here: a script that has data of its own does without the library.
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    source = f"--train_dir {args.train_dir}" if args.dataset_name is None else f"--dataset_name {args.dataset_name}"
    try:
        if args.dataset_name is None:
            splits = load_dataset(kind, data_dir=args.train_dir, **options)
        else:
            splits = load_dataset(args.dataset_name, args.dataset_config_name)
    except (OSError, ValueError, DatasetsError) as error:
        raise SystemExit(f"{source} cannot be read: {error.__cause__ or error}") from None
    if "train" not in splits:
        # Files and folders whose names have a word such as `test` in them are taken for that split.
        raise SystemExit(f"{source} has nothing to train on, only: {', '.join(splits)}")
    return splits


def check_columns(rows, *names):
    """End with a word where a column that was asked for is missing."""
    if missing := set(names) - set(rows.column_names):
        raise SystemExit(f"the data set has the columns {rows.column_names}, not {sorted(missing)}")


def check_sizes(train_set, eval_set):
    """End before training where there is nothing to train on, or nothing to evaluate on at its end."""
    for what, items in (("train", train_set), ("evaluate", eval_set)):
        if len(items) == 0:
            raise SystemExit(
                f"there is nothing to {what} on: {len(train_set)} training and {len(eval_set)} evaluation items"
            )
