// SPDX-License-Identifier: GPL-2.0

//! What the ring code finds around itself: a ring of atomics in place of mapped memory, and the
//! structures in it, as far as the programs need them.

#![forbid(unsafe_code)]

use crate::engine::{fence, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// Constants of the ABI as the module's bindings name them.
#[allow(non_upper_case_globals)] // bindgen's names
pub(crate) mod bindings {
    pub(crate) const metaroce_arm_METAROCE_ARM_NONE: u32 = 0;
    pub(crate) const metaroce_arm_METAROCE_ARM_SOLICITED: u32 = 1;
}

/// Errors.
#[allow(dead_code)] // the plugin has more functions than are modelled
pub(crate) mod errno {
    pub(crate) type Errno = i32;
    pub(crate) const EINVAL: Errno = 22;
    pub(crate) const ENOMEM: Errno = 12;
}

/// What lies in slots: only fields that the queues look at, each in a word.
#[allow(non_camel_case_types)] // the header's names
pub(crate) mod abi {
    /// Bytes of a receive's head.
    pub(crate) const RECV_WQE: usize = 16;

    #[derive(Clone, Copy, Default)]
    pub(crate) struct metaroce_recv_wqe {
        pub(crate) wr_id: u64,
        pub(crate) num_sge: u32,
        pub(crate) reserved: u32,
    }
    #[derive(Clone, Copy, Default)]
    pub(crate) struct metaroce_sge {
        pub(crate) addr: u64,
    }
    #[derive(Clone, Copy, Default)]
    pub(crate) struct metaroce_cqe {
        pub(crate) wr_id: u64,
        pub(crate) qpn: u32,
    }
}

/// Values that are words.
pub(crate) trait Plain: Copy {
    fn words(&self) -> Vec<u64>;
    fn of(words: &[u64]) -> Self;
}

impl Plain for abi::metaroce_recv_wqe {
    fn words(&self) -> Vec<u64> {
        vec![
            self.wr_id,
            u64::from(self.num_sge) | u64::from(self.reserved) << 32,
        ]
    }
    fn of(words: &[u64]) -> Self {
        Self {
            wr_id: words[0],
            num_sge: words[1] as u32,
            reserved: (words[1] >> 32) as u32,
        }
    }
}

impl Plain for abi::metaroce_sge {
    fn words(&self) -> Vec<u64> {
        vec![self.addr]
    }
    fn of(words: &[u64]) -> Self {
        Self { addr: words[0] }
    }
}

impl Plain for abi::metaroce_cqe {
    fn words(&self) -> Vec<u64> {
        vec![self.wr_id, u64::from(self.qpn)]
    }
    fn of(words: &[u64]) -> Self {
        Self {
            wr_id: words[0],
            qpn: words[1] as u32,
        }
    }
}

/// Rings.
pub(crate) mod ring {
    use super::*;

    struct Shared {
        producer: AtomicU32,
        consumer: AtomicU32,
        arm: AtomicU32,
        slots: Vec<Vec<AtomicU64>>,
    }

    /// A ring, as both sides see it.
    #[derive(Clone)]
    pub(crate) struct Ring(Arc<Shared>);

    impl Ring {
        pub(crate) fn new(entries: usize, words: usize) -> Self {
            let slot = || (0..words).map(|_| AtomicU64::new(0)).collect();
            Ring(Arc::new(Shared {
                producer: AtomicU32::new(0),
                consumer: AtomicU32::new(0),
                arm: AtomicU32::new(0),
                slots: (0..entries).map(|_| slot()).collect(),
            }))
        }

        pub(crate) fn entries(&self) -> u32 {
            self.0.slots.len() as u32
        }

        pub(crate) fn producer(&self) -> &AtomicU32 {
            &self.0.producer
        }

        pub(crate) fn consumer(&self) -> &AtomicU32 {
            &self.0.consumer
        }

        pub(crate) fn arm(&self) -> &AtomicU32 {
            &self.0.arm
        }

        pub(crate) fn slot(&self, index: u32) -> Slot<'_> {
            Slot(&self.0.slots[index as usize % self.0.slots.len()])
        }

        /// What `ArmWord::raise` of the plugin does.
        pub(crate) fn raise(&self, level: u32) {
            self.arm().fetch_max(level, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    /// A slot.
    pub(crate) struct Slot<'a>(&'a [AtomicU64]);

    impl Slot<'_> {
        #[must_use]
        pub(crate) fn put<T: Plain>(&self, offset: usize, values: &[T]) -> Option<()> {
            let words = values.iter().flat_map(Plain::words);
            for (i, word) in words.enumerate() {
                self.0.get(offset / 8 + i)?.store(word, Ordering::Relaxed);
            }
            Some(())
        }

        pub(crate) fn get<T: Plain>(&self) -> Option<T> {
            let words: Vec<u64> = self.0.iter().map(|w| w.load(Ordering::Relaxed)).collect();
            Some(T::of(&words))
        }
    }

    macro_rules! words {
        ($side:path) => {
            impl $side for Ring {
                fn producer(&self) -> &AtomicU32 {
                    self.producer()
                }
                fn consumer(&self) -> &AtomicU32 {
                    self.consumer()
                }
                fn arm(&self) -> &AtomicU32 {
                    self.arm()
                }
                fn entries(&self) -> u32 {
                    self.entries()
                }
                fn read(&self, index: u32, word: usize, to: &mut [u64]) {
                    for (i, to) in to.iter_mut().enumerate() {
                        *to = self.slot(index).0[word + i].load(Ordering::Relaxed);
                    }
                }
                fn write(&self, index: u32, from: &[u64]) {
                    for (word, from) in self.slot(index).0.iter().zip(from) {
                        word.store(*from, Ordering::Relaxed);
                    }
                }
            }
        };
    }
    words!(crate::order::Words);
    words!(crate::without_fences::order::Words);
}
