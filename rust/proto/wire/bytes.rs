// SPDX-License-Identifier: GPL-2.0

//! Checked reading and writing of big-endian fields.

#![forbid(unsafe_code)]

use super::Drop;
use crate::proto::api::HEADER_MAX;

/// Reads fields off a slice.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    #[inline(always)]
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    #[inline(always)]
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Drop> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(Drop::Short)?;
        self.rest = rest;
        Ok(*head)
    }

    #[inline(always)]
    pub(super) fn u8(&mut self) -> Result<u8, Drop> {
        Ok(u8::from_be_bytes(self.take()?))
    }

    #[inline(always)]
    pub(super) fn u16(&mut self) -> Result<u16, Drop> {
        Ok(u16::from_be_bytes(self.take()?))
    }

    #[inline(always)]
    pub(super) fn u32(&mut self) -> Result<u32, Drop> {
        Ok(u32::from_be_bytes(self.take()?))
    }

    #[inline(always)]
    pub(super) fn u64(&mut self) -> Result<u64, Drop> {
        Ok(u64::from_be_bytes(self.take()?))
    }

    #[inline(always)]
    pub(super) fn gid(&mut self) -> Result<[u8; 16], Drop> {
        self.take()
    }

    /// The next `len` bytes.
    #[inline(always)]
    pub(super) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Drop> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(Drop::Short)?;
        self.rest = rest;
        Ok(head)
    }

    /// Everything was read.
    #[inline(always)]
    pub(super) fn end(&self) -> Result<(), Drop> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Drop::Length)
        }
    }
}

/// Writes fields into a header buffer. What does not fit is not written and marks the
/// writer as overflown ([`Writer::finish`] then gives 0).
#[derive(Debug)]
pub struct Writer<'a> {
    buf: &'a mut [u8; HEADER_MAX],
    at: usize,
    overflow: bool,
}

impl<'a> Writer<'a> {
    /// Writes from the begin of `buf`.
    pub fn new(buf: &'a mut [u8; HEADER_MAX]) -> Self {
        Self {
            buf,
            at: 0,
            overflow: false,
        }
    }

    #[inline(always)]
    fn put<const N: usize>(&mut self, v: [u8; N]) {
        let end = self.at.wrapping_add(N);
        match self.buf.get_mut(self.at..end) {
            Some(s) => {
                s.copy_from_slice(&v);
                self.at = end;
            }
            None => self.overflow = true,
        }
    }

    #[inline(always)]
    pub(super) fn u8(&mut self, v: u8) {
        self.put(v.to_be_bytes());
    }

    #[inline(always)]
    pub(super) fn u16(&mut self, v: u16) {
        self.put(v.to_be_bytes());
    }

    #[inline(always)]
    pub(super) fn u32(&mut self, v: u32) {
        self.put(v.to_be_bytes());
    }

    #[inline(always)]
    pub(super) fn u64(&mut self, v: u64) {
        self.put(v.to_be_bytes());
    }

    #[inline(always)]
    pub(super) fn gid(&mut self, v: &[u8; 16]) {
        self.put(*v);
    }

    #[inline(always)]
    pub(super) fn zeros(&mut self, n: usize) {
        for _ in 0..n {
            self.u8(0);
        }
    }

    /// Bytes written so far.
    pub fn len(&self) -> usize {
        self.at
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.at == 0
    }

    /// Bytes that still fit.
    #[inline(always)]
    pub fn room(&self) -> usize {
        HEADER_MAX.saturating_sub(self.at)
    }

    /// Overwrites one byte that was written before.
    #[inline(always)]
    pub(super) fn patch_u8(&mut self, at: usize, v: u8) {
        if let Some(b) = self.buf.get_mut(at) {
            *b = v;
        }
    }

    /// Writes the header length into the base header and gives it; 0 when something did
    /// not fit.
    pub fn finish(self) -> u16 {
        if self.overflow {
            return 0;
        }
        let len = self.at as u16; // HEADER_MAX fits
        if let Some(s) = self.buf.get_mut(2..4) {
            s.copy_from_slice(&len.to_be_bytes());
        }
        len
    }
}
