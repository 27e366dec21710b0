def pinned_block_bytes(n):
    return 1 << (n - 1).bit_length() if n else 0
