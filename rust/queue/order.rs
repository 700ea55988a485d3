// SPDX-License-Identifier: GPL-2.0

//! Who may see what in a ring, and when: all that the kernel does with its indices and its arm
//! word. Apart from where a ring lies, so that ../model can check it against the program's side.

#![forbid(unsafe_code)]

use super::atomic::{fence, AtomicU32, Ordering};
use crate::bindings;

/// The words of a ring.
pub(crate) trait Words {
    /// Index of the side that fills the ring.
    fn producer(&self) -> &AtomicU32;
    /// Index of the side that empties it.
    fn consumer(&self) -> &AtomicU32;
    /// CQ: what the program waits for. RQ: whether it is to ring the doorbell. SRQ: receives
    /// that have gone without a completion.
    fn arm(&self) -> &AtomicU32;
    /// Slots, a power of two.
    fn entries(&self) -> u32;
    /// Copies words of the slot of `index`, from word `word` on; words outside of it read as 0.
    fn read(&self, index: u32, word: usize, to: &mut [u64]);
    /// Writes words of the slot of `index`, from its start on.
    fn write(&self, index: u32, from: &[u64]);
}

/// Slots that the program has filled, when the kernel has taken all before `taken`; never more
/// than there are slots. What they hold may be read afterwards.
pub(crate) fn filled(ring: &impl Words, taken: u32) -> u32 {
    posted(ring).wrapping_sub(taken).min(ring.entries())
}

/// The program's index as it is.
pub(crate) fn posted(ring: &impl Words) -> u32 {
    ring.producer().load(Ordering::Acquire)
}

/// Tells the program that the kernel is done with all slots before `index`.
pub(crate) fn release(ring: &impl Words, index: u32) {
    ring.consumer().store(index, Ordering::Release);
}

/// Tells the program how many receives of an SRQ have gone without a completion.
pub(crate) fn publish_lost(ring: &impl Words, count: u32) {
    ring.arm().store(count, Ordering::Release);
}

/// Asks the program to ring the doorbell for receives (or no longer to). Whoever sets it looks
/// at the ring afterwards: the program has posted before it looks here.
pub(crate) fn want_doorbell(ring: &impl Words, wanted: bool) {
    ring.arm().store(u32::from(wanted), Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Completions that the program has not consumed, when the kernel has written all before
/// `producer`; more than there are slots when its index makes no sense.
pub(crate) fn unpolled(ring: &impl Words, producer: u32) -> u32 {
    producer.wrapping_sub(ring.consumer().load(Ordering::Acquire))
}

/// Appends a completion and moves `producer` on; `false` when the ring is full.
pub(crate) fn push(ring: &impl Words, producer: &mut u32, words: &[u64]) -> bool {
    if unpolled(ring, *producer) >= ring.entries() {
        return false;
    }
    ring.write(*producer, words);
    *producer = producer.wrapping_add(1);
    ring.producer().store(*producer, Ordering::Release);
    true
}

/// Whether the program waits for what has just been pushed; disarms if so.
pub(crate) fn take_arm(ring: &impl Words, solicited: bool) -> bool {
    // Against a program that arms and then looks at `producer`.
    fence(Ordering::SeqCst);
    let wanted = match ring.arm().load(Ordering::Relaxed) {
        bindings::metaroce_arm_METAROCE_ARM_NONE => false,
        bindings::metaroce_arm_METAROCE_ARM_SOLICITED => solicited,
        _ => true,
    };
    wanted && ring.arm().swap(0, Ordering::AcqRel) != 0
}
