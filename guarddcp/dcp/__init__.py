"""The StorageWriter/StorageReader pair for torch.distributed.checkpoint, and what it is made of.

Save: writer -> pairing (m and v as one item) -> saving (encode, stream) -> manifest.
Load: reader -> manifest -> loading (prove, fetch, decode, copy).
"""
