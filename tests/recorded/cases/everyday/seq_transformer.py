"""Translation with nn.Transformer: sentences of different lengths, padded by the collate function."""

import math
import random
from timeit import default_timer as timer

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)
random.seed(0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX = 0, 1, 2, 3
SRC, TGT, EMB, NHEAD, FFN, BATCH, LAYERS = 3000, 4000, 256, 8, 512, 32, 3


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=5000):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pe = torch.zeros((maxlen, emb_size))
        pe[:, 0::2] = torch.sin(pos * den)
        pe[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pe.unsqueeze(-2))

    def forward(self, x):
        return self.dropout(x + self.pos_embedding[: x.size(0), :])


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size, emb_size):
        super().__init__()
        self.embedding, self.emb_size = nn.Embedding(vocab_size, emb_size), emb_size

    def forward(self, tokens):
        return self.embedding(tokens.long()) * math.sqrt(self.emb_size)


class Seq2SeqTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(
            d_model=EMB,
            nhead=NHEAD,
            num_encoder_layers=LAYERS,
            num_decoder_layers=LAYERS,
            dim_feedforward=FFN,
            dropout=0.1,
        )
        self.generator = nn.Linear(EMB, TGT)
        self.src_tok_emb, self.tgt_tok_emb = TokenEmbedding(SRC, EMB), TokenEmbedding(TGT, EMB)
        self.positional_encoding = PositionalEncoding(EMB, 0.1)

    def forward(self, src, trg, src_mask, tgt_mask, src_pad, tgt_pad, mem_pad):
        outs = self.transformer(
            self.positional_encoding(self.src_tok_emb(src)),
            self.positional_encoding(self.tgt_tok_emb(trg)),
            src_mask,
            tgt_mask,
            None,
            src_pad,
            tgt_pad,
            mem_pad,
        )
        return self.generator(outs)

    def encode(self, src, src_mask):
        return self.transformer.encoder(self.positional_encoding(self.src_tok_emb(src)), src_mask)

    def decode(self, tgt, memory, tgt_mask):
        return self.transformer.decoder(self.positional_encoding(self.tgt_tok_emb(tgt)), memory, tgt_mask)


def square_mask(sz):
    mask = (torch.triu(torch.ones((sz, sz), device=DEVICE)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, float(0.0))


def create_mask(src, tgt):
    return (
        torch.zeros((src.shape[0], src.shape[0]), device=DEVICE).type(torch.bool),
        square_mask(tgt.shape[0]),
        (src == PAD_IDX).transpose(0, 1),
        (tgt == PAD_IDX).transpose(0, 1),
    )


def sentence(words, n):
    return torch.cat(
        (torch.tensor([BOS_IDX]), torch.tensor([random.randrange(4, words) for _ in range(n)]), torch.tensor([EOS_IDX]))
    )


def collate_fn(batch):
    src, tgt = zip(*batch)
    return pad_sequence(src, padding_value=PAD_IDX), pad_sequence(tgt, padding_value=PAD_IDX)


pairs = [(sentence(SRC, random.randint(8, 60)), sentence(TGT, random.randint(8, 60))) for _ in range(96)]
model = Seq2SeqTransformer()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
model = model.to(DEVICE)
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD_IDX)
optimizer = torch.optim.Adam(model.parameters(), lr=0.0001, betas=(0.9, 0.98), eps=1e-9)


def train_epoch(model, optimizer):
    model.train()
    losses = 0
    loader = DataLoader(pairs, batch_size=BATCH, shuffle=True, collate_fn=collate_fn)
    for src, tgt in loader:
        src, tgt = src.to(DEVICE), tgt.to(DEVICE)
        tgt_input = tgt[:-1, :]
        src_mask, tgt_mask, src_pad, tgt_pad = create_mask(src, tgt_input)
        logits = model(src, tgt_input, src_mask, tgt_mask, src_pad, tgt_pad, src_pad)
        optimizer.zero_grad()
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[1:, :].reshape(-1))
        loss.backward()
        optimizer.step()
        losses += loss.item()
    return losses / len(list(loader))


def evaluate(model):
    model.eval()
    losses = 0
    loader = DataLoader(pairs[:40], batch_size=BATCH, collate_fn=collate_fn)
    for src, tgt in loader:
        src, tgt = src.to(DEVICE), tgt.to(DEVICE)
        tgt_input = tgt[:-1, :]
        src_mask, tgt_mask, src_pad, tgt_pad = create_mask(src, tgt_input)
        logits = model(src, tgt_input, src_mask, tgt_mask, src_pad, tgt_pad, src_pad)
        losses += loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[1:, :].reshape(-1)).item()
    return losses / len(list(loader))


def greedy_decode(model, src, src_mask, max_len):
    memory = model.encode(src.to(DEVICE), src_mask.to(DEVICE))
    ys = torch.ones(1, 1).fill_(BOS_IDX).type(torch.long).to(DEVICE)
    for _ in range(max_len - 1):
        out = model.decode(ys, memory, square_mask(ys.size(0)).type(torch.bool).to(DEVICE)).transpose(0, 1)
        _, next_word = torch.max(model.generator(out[:, -1]), dim=1)
        ys = torch.cat([ys, torch.ones(1, 1).type_as(src.data).to(DEVICE).fill_(0)], dim=0)
    return ys


start = timer()
print("train", train_epoch(model, optimizer))
print("eval", evaluate(model), timer() - start)
with torch.no_grad():
    s = pairs[0][0].view(-1, 1)
    print(greedy_decode(model, s, torch.zeros(s.shape[0], s.shape[0]).type(torch.bool), 12).flatten().shape)
