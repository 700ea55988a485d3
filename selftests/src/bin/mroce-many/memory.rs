// SPDX-License-Identifier: GPL-2.0
//! What the kernel's own memory is, by /proc/meminfo.

#![forbid(unsafe_code)]

use selftests::ktap::Outcome;
use std::fmt;

/// Bytes that the kernel has for itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory {
    /// All that is no program's, no page of a file and no page table of a program.
    pub total: u64,
    /// Of those, unreclaimable slab.
    pub slab: u64,
    /// Of those, vmalloc.
    pub vmalloc: u64,
}

impl Memory {
    /// As it is now.
    pub fn now() -> Outcome<Self> {
        let text = std::fs::read_to_string("/proc/meminfo").map_err(|e| format!("/proc/meminfo: {e}"))?;
        let of = |name: &str| -> u64 {
            let line = text.lines().find(|l| l.split(':').next() == Some(name));
            line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0) << 10
        };
        let others = ["MemFree", "Buffers", "Cached", "AnonPages", "PageTables"];
        Ok(Memory {
            total: of("MemTotal").saturating_sub(others.iter().map(|n| of(n)).sum()),
            slab: of("SUnreclaim"),
            vmalloc: of("VmallocUsed"),
        })
    }

    /// What it has grown by since `before`; 0 where it has shrunk.
    pub fn since(&self, before: &Memory) -> Memory {
        Memory {
            total: self.total.saturating_sub(before.total),
            slab: self.slab.saturating_sub(before.slab),
            vmalloc: self.vmalloc.saturating_sub(before.vmalloc),
        }
    }

    /// The part of one of `count`.
    pub fn each(&self, count: u64) -> Memory {
        let count = count.max(1);
        Memory { total: self.total / count, slab: self.slab / count, vmalloc: self.vmalloc / count }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes (slab {}, vmalloc {})", self.total, self.slab, self.vmalloc)
    }
}
