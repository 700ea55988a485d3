// SPDX-License-Identifier: GPL-2.0
/*
 * helpers.c: what bindgen cannot see (static inline functions, macros), as functions and
 * constants named metaroce_<name> and METAROCE_CONST_<NAME>. bindgen runs over this file, so
 * a definition here is all that is needed; no policy lives here, one call each.
 */
#include "bindings/bindings_helper.h"

/* rtnl and reference counts */
void metaroce_dev_hold(struct net_device *dev)
{
	dev_hold(dev);
}

void metaroce_dev_put(struct net_device *dev)
{
	dev_put(dev);
}

/* bottom halves */
void metaroce_local_bh_disable(void)
{
	local_bh_disable();
}

void metaroce_local_bh_enable(void)
{
	local_bh_enable();
}

void metaroce_init_work(struct work_struct *work, work_func_t func)
{
	INIT_WORK(work, func);
}

bool metaroce_queue_bh_work(struct work_struct *work)
{
	return queue_work(system_bh_wq, work);
}
