// SPDX-License-Identifier: GPL-2.0

//! Memory of the cargo build: the standard library's.

#![forbid(unsafe_code)]

extern crate std;

/// Memory could not be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocError;

/// A value on the heap.
pub type Box<T> = std::boxed::Box<T>;

/// Moves `value` to the heap.
pub fn try_box<T>(value: T) -> Result<Box<T>, AllocError> {
    Ok(Box::new(value))
}

/// Moves what `make` makes to the heap.
pub fn try_box_with<T>(make: impl FnOnce() -> Result<T, AllocError>) -> Result<Box<T>, AllocError> {
    Ok(Box::new(make()?))
}

/// The vector below [`super::Vec`].
pub struct RawVec<T>(std::vec::Vec<T>);

impl<T> RawVec<T> {
    pub(super) const fn new() -> Self {
        Self(std::vec::Vec::new())
    }

    pub(super) fn try_reserve_more(&mut self, additional: usize) -> Result<(), AllocError> {
        self.0.try_reserve_exact(additional).map_err(|_| AllocError)
    }

    pub(super) fn push_within(&mut self, value: T) -> Result<(), T> {
        if self.0.len() == self.0.capacity() {
            return Err(value);
        }
        self.0.push(value);
        Ok(())
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
