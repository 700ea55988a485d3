// SPDX-License-Identifier: GPL-2.0

//! The only seam between the kernel build and the cargo build of the protocol core:
//! fallible memory. Everything here is called in process context; the packet path only
//! pushes within capacity.

#![forbid(unsafe_code)]

#[cfg(MODULE)]
mod kernel;
#[cfg(not(MODULE))]
mod user;

#[cfg(MODULE)]
pub use self::kernel::{try_box, try_box_with, AllocError, Box, RawVec};
#[cfg(not(MODULE))]
pub use self::user::{try_box, try_box_with, AllocError, Box, RawVec};

use core::ops::{Deref, DerefMut};

/// A vector that grows only when it is asked to ([`Vec::reserve`], process context):
/// [`Vec::push`] within capacity never allocates and hands the value back when full.
pub struct Vec<T>(RawVec<T>);

impl<T> Vec<T> {
    /// An empty vector without memory.
    pub const fn new() -> Self {
        Self(RawVec::new())
    }

    /// An empty vector with room for `capacity` elements.
    pub fn with_capacity(capacity: usize) -> Result<Self, AllocError> {
        let mut v = Self::new();
        v.reserve(capacity)?;
        Ok(v)
    }

    /// A full vector of `len` elements, each made by `make` from its index.
    pub fn from_fn(len: usize, mut make: impl FnMut(usize) -> T) -> Result<Self, AllocError> {
        let mut v = Self::with_capacity(len)?;
        for i in 0..len {
            if v.push(make(i)).is_err() {
                return Err(AllocError);
            }
        }
        Ok(v)
    }

    /// Makes room for `additional` more elements. May sleep in the kernel.
    pub fn reserve(&mut self, additional: usize) -> Result<(), AllocError> {
        self.0.try_reserve_more(additional)
    }

    /// Appends `value`, or hands it back when the capacity is used up.
    pub fn push(&mut self, value: T) -> Result<(), T> {
        self.0.push_within(value)
    }

    /// Removes the last element.
    pub fn pop(&mut self) -> Option<T> {
        self.0.pop()
    }

    /// Removes all elements and keeps the memory.
    pub fn clear(&mut self) {
        self.0.clear()
    }

    /// Elements there is room for.
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }
}

impl<T> Default for Vec<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Deref for Vec<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.0.as_elements()
    }
}

impl<T> DerefMut for Vec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.0.as_elements_mut()
    }
}
