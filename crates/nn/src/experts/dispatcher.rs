//! Token dispatch and combine: all-to-alls that send rows to the ranks with their experts, and back.
//!
//! A first all-to-all exchanges the number of rows for each expert; after it all splits are exact. Rows are sent
//! twice in forward (dispatch and combine), and their gradients twice in backward. A rank with nothing to send or
//! receive still takes part.

use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_torch::{Group, TorchError, Work, autograd, device, meta};
use trainyard_trace::Purpose;

use crate::Result;

/// Dispatches tokens of one layer call to experts; holds the splits of its all-to-alls.
pub(super) struct TokenDispatcher {
    group: Option<Group>,
    /// The number of rows to send to each rank.
    sent: Vec<i64>,
    /// The number of rows to receive from each rank, for each of this rank's experts.
    received: Vec<Vec<i64>>,
}

impl TokenDispatcher {
    /// Exchanges the number of rows for each expert with all ranks, from host to host.
    pub(super) fn new(group: Option<&Group>, counts: &[i64]) -> Result<TokenDispatcher> {
        let Some(group) = group else {
            return Ok(TokenDispatcher {
                group: None,
                sent: vec![counts.iter().sum()],
                received: vec![counts.to_vec()],
            });
        };
        let each = counts.len() / group.size();
        let own = Tensor::f_from_slice(counts)?;
        let found = own.f_zeros_like()?;
        let splits = vec![each as i64; group.size()];
        group
            .all_to_all(&found, &own, &splits, &splits, Purpose::Control)?
            .wait()?;
        let found = if group.is_fake() {
            // A dry run assumes that every rank is like this one.
            let own = &counts[group.index() * each..][..each];
            own.repeat(group.size())
        } else {
            Vec::<i64>::try_from(&found)?
        };
        Ok(TokenDispatcher {
            sent: counts
                .chunks(each)
                .map(|of_rank| of_rank.iter().sum())
                .collect(),
            received: found.chunks(each).map(<[i64]>::to_vec).collect(),
            group: Some(group.clone()),
        })
    }

    /// The number of rows of each of this rank's experts.
    pub(super) fn rows_per_expert(&self) -> Vec<i64> {
        let num_experts = self.received.first().map_or(0, Vec::len);
        let of_expert = |expert: usize| self.received.iter().map(|from| from[expert]).sum();
        (0..num_experts).map(of_expert).collect()
    }

    /// Sends data that belongs to rows and has no gradient. Unlike [`TokenDispatcher::dispatch`], it keeps the order
    /// of arrival, so it is for groups with one destination per rank.
    pub(super) fn dispatch_metadata(&self, sorted: &Tensor) -> Result<Tensor> {
        let Some(plan) = self.dispatch_plan() else {
            return Ok(sorted.shallow_clone());
        };
        let (out, work) = plan.begin(sorted)?;
        work.wait()?;
        Ok(out)
    }

    /// Sends rows, sorted by expert, to the ranks of their experts; returns the rows of this rank's experts, sorted
    /// by expert.
    pub(super) fn dispatch(&self, rows: &Tensor) -> Result<Tensor> {
        let Some(plan) = self.dispatch_plan() else {
            return Ok(rows.shallow_clone());
        };
        let arrived = start(plan, rows)?.finish()?;
        if self.is_sorted_by_expert() {
            return Ok(arrived);
        }
        let (by_expert, by_rank) = self.orders(&arrived)?;
        permuted(&arrived, by_expert, by_rank)
    }

    /// Starts the combine: sends the experts' outputs back.
    pub(super) fn start_combine(&self, rows: &Tensor) -> Result<PendingCombine> {
        let Some(plan) = self.dispatch_plan() else {
            return Ok(PendingCombine::Local(rows.shallow_clone()));
        };
        let mut rows = rows.shallow_clone();
        if !self.is_sorted_by_expert() {
            let (by_expert, by_rank) = self.orders(&rows)?;
            rows = permuted(&rows, by_rank, by_expert)?;
        }
        let in_flight = start(plan.reversed(), &rows)?;
        Ok(PendingCombine::Remote(Box::new(in_flight)))
    }

    /// The dispatch all-to-all, if there are several ranks.
    fn dispatch_plan(&self) -> Option<AllToAll> {
        Some(AllToAll {
            group: self.group.clone()?,
            sent: self.sent.clone(),
            received: self.rows_from_each(),
            purpose: Purpose::Dispatch,
        })
    }

    /// Whether received rows, which are sorted by rank, are sorted by expert already.
    fn is_sorted_by_expert(&self) -> bool {
        self.received.first().is_some_and(|from| from.len() == 1)
    }

    fn rows_from_each(&self) -> Vec<i64> {
        self.received.iter().map(|from| from.iter().sum()).collect()
    }

    /// The permutation from sorted by rank to sorted by expert, and its inverse.
    fn orders(&self, like: &Tensor) -> Result<(Tensor, Tensor)> {
        let (by_expert, by_rank) = orders(&self.received);
        let tensor = |order: &[i64]| -> Result<Tensor> {
            Ok(if meta::is_meta(like) {
                meta::empty(&[order.len() as i64], Kind::Int64)?
            } else {
                device::from_slice(order, like.device())?
            })
        };
        Ok((tensor(&by_expert)?, tensor(&by_rank)?))
    }
}

/// For received rows, sorted by rank and then by expert: the permutation that sorts them by expert, and its inverse.
fn orders(received: &[Vec<i64>]) -> (Vec<i64>, Vec<i64>) {
    let num_experts = received.first().map_or(0, Vec::len);
    let mut start = 0;
    let mut starts = Vec::with_capacity(received.len() * num_experts);
    for count in received.iter().flatten() {
        starts.push(start);
        start += count;
    }
    let mut by_expert = Vec::with_capacity(start as usize);
    for expert in 0..num_experts {
        for (rank, counts) in received.iter().enumerate() {
            let start = starts[rank * num_experts + expert];
            by_expert.extend(start..start + counts[expert]);
        }
    }
    let mut by_rank = vec![0; by_expert.len()];
    for (position, &row) in by_expert.iter().enumerate() {
        by_rank[row as usize] = position as i64;
    }
    (by_expert, by_rank)
}

/// Permutes rows; backward applies the inverse to gradients.
fn permuted(rows: &Tensor, order: Tensor, back: Tensor) -> Result<Tensor> {
    Ok(autograd::apply(
        &[rows],
        |_, inputs| Ok(inputs[0].f_index_select(0, &order)?),
        move |_, gradients| match gradients {
            [Some(gradient)] => Ok(vec![Some(gradient.f_index_select(0, &back)?)]),
            _ => Ok(vec![None]),
        },
    )?)
}

/// A combine that has been started.
pub(super) enum PendingCombine {
    /// There is one rank: the rows are local.
    Local(Tensor),
    /// The rows are being received from other ranks.
    Remote(Box<InFlight>),
}

impl PendingCombine {
    /// Waits for the rows.
    pub(super) fn finish(self) -> Result<Tensor> {
        match self {
            PendingCombine::Local(rows) => Ok(rows),
            PendingCombine::Remote(rows) => rows.finish(),
        }
    }
}

/// The splits and the purpose of an all-to-all.
#[derive(Clone)]
struct AllToAll {
    group: Group,
    /// Rows to send to each rank.
    sent: Vec<i64>,
    /// Rows to receive from each rank.
    received: Vec<i64>,
    purpose: Purpose,
}

impl AllToAll {
    /// The inverse all-to-all.
    fn reversed(self) -> AllToAll {
        AllToAll {
            sent: self.received,
            received: self.sent,
            purpose: match self.purpose {
                Purpose::Dispatch => Purpose::Combine,
                _ => Purpose::Dispatch,
            },
            ..self
        }
    }

    /// Starts the all-to-all.
    fn begin(&self, rows: &Tensor) -> Result<(Tensor, Work), TorchError> {
        let rows = rows.f_contiguous()?;
        let (_, width) = rows.size2()?;
        let out = meta::new_empty(&rows, &[self.received.iter().sum(), width])?;
        let work = self
            .group
            .all_to_all(&out, &rows, &self.received, &self.sent, self.purpose)?;
        Ok((out, work))
    }
}

/// An all-to-all in flight. It starts and ends in two autograd functions, so that other work can run in between, in
/// backward too: the backward of the end starts the all-to-all of gradients, and the backward of the start waits for
/// it.
pub(super) struct InFlight {
    plan: AllToAll,
    rows: Tensor,
    work: Work,
    /// The all-to-all of gradients, once backward has started it.
    gradients: Slot,
}

/// Gradients in flight. They bypass autograd, which requires matching shapes between functions.
type Slot = Arc<Mutex<Option<(Tensor, Work)>>>;

fn start(plan: AllToAll, rows: &Tensor) -> Result<InFlight> {
    let gradients = Slot::default();
    let backward_gradients = Arc::clone(&gradients);
    let mut begun = None;
    let rows = autograd::apply(
        &[rows],
        |_, inputs| {
            let (out, work) = plan.begin(inputs[0])?;
            begun = Some(work);
            Ok(out)
        },
        move |_, _| {
            let begun = backward_gradients
                .lock()
                .unwrap_or_else(|e| e.into_inner())
                .take();
            let Some((gradient, work)) = begun else {
                return Ok(vec![None]);
            };
            work.wait()?;
            Ok(vec![Some(gradient)])
        },
    )?;
    let not_started = || TorchError::Invalid("the all-to-all did not start".to_owned());
    Ok(InFlight {
        plan,
        rows,
        work: begun.ok_or_else(not_started)?,
        gradients,
    })
}

impl InFlight {
    fn finish(self) -> Result<Tensor> {
        let InFlight {
            plan,
            rows,
            work,
            gradients: in_flight,
        } = self;
        let back = plan.reversed();
        Ok(autograd::apply(
            &[&rows],
            |_, inputs| {
                work.wait()?;
                Ok(inputs[0].f_detach()?)
            },
            move |_, gradients| {
                let [Some(gradient)] = gradients else {
                    return Ok(vec![None]);
                };
                let begun = back.begin(gradient)?;
                *in_flight.lock().unwrap_or_else(|e| e.into_inner()) = Some(begun);
                Ok(vec![Some(gradient.shallow_clone())])
            },
        )?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rows_sorted_by_rank_are_sorted_by_expert() {
        // Two ranks: rank 0 sends 1 and 2 rows for two experts, rank 1 sends 2 and 0.
        let (by_expert, by_rank) = orders(&[vec![1, 2], vec![2, 0]]);
        assert_eq!(by_expert, [0, 3, 4, 1, 2]);
        assert_eq!(by_rank, [0, 3, 4, 1, 2]);
    }

    proptest! {
        #[test]
        fn orders_are_inverse_and_sort_by_expert(
            received in (1usize..5, 1usize..6).prop_flat_map(|(ranks, experts)| {
                prop::collection::vec(prop::collection::vec(0i64..4, experts), ranks)
            }),
        ) {
            let (by_expert, by_rank) = orders(&received);
            let of_row: Vec<usize> = received
                .iter()
                .flat_map(|counts| counts.iter().enumerate())
                .flat_map(|(expert, &count)| std::iter::repeat_n(expert, count as usize))
                .collect();
            let sorted: Vec<usize> = by_expert.iter().map(|&row| of_row[row as usize]).collect();
            prop_assert!(sorted.is_sorted());
            for (position, &row) in by_expert.iter().enumerate() {
                prop_assert_eq!(by_rank[row as usize], position as i64);
            }
        }
    }
}
