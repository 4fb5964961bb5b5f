//! Checks prepared token files: a damaged one would train a model on noise, or end a job days later.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use crate::index::{Index, Shard};
use crate::token_file::{HEADER_BYTES, Width, read_header};
use crate::{Result, TokenizeError};

/// How many bytes are read at a time; a multiple of the bytes of a token.
const CHUNK_BYTES: usize = 1 << 20;

/// Reads every token file of a directory, and checks its digest, its number of tokens and that every token is in the
/// vocabulary. Calls `progress` with the number of bytes read since the last call.
pub fn verify(dir: &Path, progress: &dyn Fn(u64)) -> Result<Index> {
    let index = Index::read(dir)?;
    for (shard, path) in index.shards.iter().zip(index.paths(dir)) {
        verify_file(&path, shard, index.vocab_size, progress)?;
    }
    Ok(index)
}

fn verify_file(
    path: &Path,
    shard: &Shard,
    vocab_size: usize,
    progress: &dyn Fn(u64),
) -> Result<()> {
    let damaged = |reason: String| TokenizeError::damaged(path, reason);
    let file = File::open(path).map_err(TokenizeError::io(path))?;
    let size = file.metadata().map_err(TokenizeError::io(path))?.len();
    let mut file = BufReader::with_capacity(CHUNK_BYTES, file);
    let mut header = [0; HEADER_BYTES as usize];
    let read = file.read_exact(&mut header);
    read.map_err(TokenizeError::io(path))?;
    let (width, num_tokens) = read_header(&header, size).map_err(damaged)?;
    if num_tokens != shard.num_tokens {
        return Err(damaged(format!(
            "it has {num_tokens} tokens, and the index says {}",
            shard.num_tokens
        )));
    }
    let mut digest = blake3::Hasher::new();
    digest.update(&header);
    progress(HEADER_BYTES);
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut remaining = size - HEADER_BYTES;
    while remaining > 0 {
        let length = remaining.min(CHUNK_BYTES as u64) as usize;
        let chunk = &mut chunk[..length];
        file.read_exact(chunk).map_err(TokenizeError::io(path))?;
        digest.update(chunk);
        check_range(chunk, width, vocab_size).map_err(damaged)?;
        remaining -= length as u64;
        progress(length as u64);
    }
    if digest.finalize().to_hex().as_str() == shard.digest {
        Ok(())
    } else {
        Err(damaged("its digest is not that of the index".to_owned()))
    }
}

fn check_range(bytes: &[u8], width: Width, vocab_size: usize) -> Result<(), String> {
    let tokens = width.decode(bytes);
    match tokens
        .iter()
        .find(|token| **token as u64 >= vocab_size as u64)
    {
        None => Ok(()),
        Some(token) => Err(format!(
            "it has token {token}, and the vocabulary has {vocab_size} tokens"
        )),
    }
}
