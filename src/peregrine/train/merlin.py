"""Merlin end to end from a folder of text: tokenizer, tokens, target. Each stage is skipped if it is done."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from peregrine.log import logger
from peregrine.models.families import read_config
from peregrine.models.loading import decoder_plan
from peregrine.train.data import MERLIN_SHARES, Source, find_sources, sample_documents
from peregrine.train.export import stored_tensors, write_sharded
from peregrine.train.packing import HELD_OUT, TRAIN, encode_source, load_shard
from peregrine.train.pretrain import Options, Run, pretrain
from peregrine.train.requests import with_requests
from peregrine.train.shape import Shape, write_configs
from peregrine.train.tokenizer import save_tokenizer, train_tokenizer

TOKENIZER_BYTES = 60_000_000


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where things are: the text, the model that comes out, and what is kept between stages."""

    data: Path
    out: Path
    work: Path

    @property
    def tokens(self) -> Path:
        return self.work / "tokens"

    @property
    def run(self) -> Path:
        return self.work / "target"


def make_target(workshop: Workshop, shape: Shape, options: Options, device: torch.device) -> None:
    """Writes a trained target in Hugging Face format into the workshop's `out`."""
    sources = find_sources(workshop.data, MERLIN_SHARES)
    write_configs(shape, workshop.out)
    tokenizer = make_tokenizer(sources, workshop.out, shape)
    sources = with_requests(sources)
    for source in sources:
        encode_source(source, tokenizer, workshop.tokens)
    config = read_config(workshop.out)
    run = Run(config, options, workshop.run, device)
    train = [load_shard(source, workshop.tokens, TRAIN) for source in sources]
    held_out = [load_shard(source, workshop.tokens, HELD_OUT) for source in sources]
    decoder = pretrain(run, train, held_out)
    write_sharded(stored_tensors(decoder, decoder_plan(config)), workshop.out)
    logger.info("the target is in %s", workshop.out)


def make_tokenizer(sources: list[Source], folder: Path, shape: Shape) -> Tokenizer:
    """The folder's tokenizer, trained on a sample of the sources if it is not there."""
    path = folder / "tokenizer.json"
    if not path.exists():
        texts = (text for s in sources for text in sample_documents(s, int(s.share * TOKENIZER_BYTES)))
        save_tokenizer(train_tokenizer(texts, shape.vocab_size), folder, shape.max_positions)
    return Tokenizer.from_file(str(path))
