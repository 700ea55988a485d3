// SPDX-License-Identifier: GPL-2.0

//! Corpora: text files with one input a line, in hex.

#![forbid(unsafe_code)]

use std::path::Path;
use std::{fs, io};

/// Reads a corpus. Lines that begin with `#` and empty ones are skipped; a line that is not
/// hex is an error.
pub fn read(path: &Path) -> io::Result<Vec<Vec<u8>>> {
    let text = fs::read_to_string(path)?;
    text.lines()
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(|l| from_hex(l).ok_or_else(|| io::Error::other(format!("{l:?} is not hex"))))
        .collect()
}

/// Writes a corpus.
pub fn write(path: &Path, inputs: &[Vec<u8>]) -> io::Result<()> {
    let mut text =
        String::from("# Inputs of the fuzzer that reach different code; one a line, in hex.\n");
    for i in inputs {
        text.push_str(&to_hex(i));
        text.push('\n');
    }
    fs::write(path, text)
}

/// Two digits for each byte.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|b| [b >> 4, b & 15])
        .filter_map(|d| char::from_digit(u32::from(d), 16))
        .collect()
}

/// The bytes that [`to_hex`] wrote; `None` when it is no such text.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text
        .chars()
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect();
    let digits = digits.filter(|d| d.len() % 2 == 0)?;
    Some(digits.chunks_exact(2).map(|d| d[0] << 4 | d[1]).collect())
}
