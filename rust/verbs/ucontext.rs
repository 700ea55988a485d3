// SPDX-License-Identifier: GPL-2.0

//! Contexts: a program that has opened the device, and the version of the ABI it speaks.
//!
//! | refusal | errno |
//! | --- | --- |
//! | versions of module and provider that do not meet | EPROTO |
//! | a range of versions the wrong way round, a reserved word that is not 0 | EINVAL |

#![forbid(unsafe_code)]

use super::MAX_SGE;
use crate::{
    kernel_ext::ib::Udata,
    mem::MAX_INLINE,
    queue::{AllocUcontextReq, AllocUcontextResp, ABI_VERSION},
};
use ::kernel::prelude::*;

/// An open device.
pub struct Context;

impl Context {
    /// Opens the device for a provider. `EPROTO` when the versions do not meet: the
    /// provider knows both ranges and says which side is too old.
    pub fn new(udata: &Udata<'_>) -> Result<Self> {
        let request: AllocUcontextReq = udata.request(::core::mem::size_of::<AllocUcontextReq>())?;
        if request.reserved != 0 || request.abi_min > request.abi_max {
            return Err(EINVAL);
        }
        if request.abi_min > ABI_VERSION || request.abi_max < ABI_VERSION {
            return Err(EPROTO);
        }
        udata.respond(&AllocUcontextResp {
            abi_version: ABI_VERSION,
            max_inline: MAX_INLINE as u32,
            max_sge: MAX_SGE,
            reserved: 0,
        })?;
        Ok(Self)
    }
}
