// SPDX-License-Identifier: GPL-2.0

//! Memory of the kernel build: kvmalloc, since a bitmap or a ring of records can be
//! larger than what the page allocator hands out in one piece; counted for the control group of
//! the program whose call needs it.

#![forbid(unsafe_code)]

use ::kernel::alloc::{flags::GFP_KERNEL_ACCOUNT, KBox, KVVec};

pub use ::kernel::alloc::AllocError;

/// A value on the heap.
pub type Box<T> = KBox<T>;

/// Moves `value` to the heap.
pub fn try_box<T>(value: T) -> Result<Box<T>, AllocError> {
    KBox::new(value, GFP_KERNEL_ACCOUNT)
}

/// Moves what `make` makes to the heap. The memory is there before: a large value passes through the
/// stack once.
pub fn try_box_with<T>(make: impl FnOnce() -> Result<T, AllocError>) -> Result<Box<T>, AllocError> {
    let memory = Box::<T>::new_uninit(GFP_KERNEL_ACCOUNT)?;
    Ok(memory.write(make()?))
}

/// The vector below [`super::Vec`].
pub struct RawVec<T>(KVVec<T>);

impl<T> RawVec<T> {
    pub(super) const fn new() -> Self {
        Self(KVVec::new())
    }

    pub(super) fn try_reserve_more(&mut self, additional: usize) -> Result<(), AllocError> {
        self.0.reserve(additional, GFP_KERNEL_ACCOUNT)
    }

    pub(super) fn push_within(&mut self, value: T) -> Result<(), T> {
        self.0.push_within_capacity(value).map_err(|e| e.0)
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        self.0.pop()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear()
    }

    pub(super) fn capacity(&self) -> usize {
        self.0.capacity()
    }

    pub(super) fn as_elements(&self) -> &[T] {
        &self.0
    }

    pub(super) fn as_elements_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}
