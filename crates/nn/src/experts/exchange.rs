//! Rows to the ranks that have their experts, and back.
//!
//! One small exchange tells every rank how many rows it will get from each other, for each of its
//! experts; after it all splits are exact. Rows travel twice in forward, there and back, and their
//! gradients twice in backward, each by one exchange. A rank that has nothing to send or to get takes
//! part all the same.

use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_torch::{Group, TorchError, Work, autograd, meta};
use trainyard_trace::Purpose;

use crate::Result;

/// How many rows go where.
pub(super) struct Exchange {
    group: Option<Group>,
    /// Rows to each rank.
    sent: Vec<i64>,
    /// Rows from each rank, for each of this rank's experts.
    received: Vec<Vec<i64>>,
}

impl Exchange {
    /// Tells all ranks the `counts` of rows for each expert, and hears theirs. `like` has the device.
    pub(super) fn new(group: Option<&Group>, counts: &[i64], like: &Tensor) -> Result<Exchange> {
        let Some(group) = group else {
            return Ok(Exchange {
                group: None,
                sent: vec![counts.iter().sum()],
                received: vec![counts.to_vec()],
            });
        };
        let each = counts.len() / group.size();
        let mut own = Tensor::f_from_slice(counts)?;
        if !meta::is_meta(like) {
            own = own.f_to_device(like.device())?;
        }
        let found = own.f_zeros_like()?;
        let splits = vec![each as i64; group.size()];
        group
            .all_to_all(&found, &own, &splits, &splits, Purpose::Control)?
            .wait()?;
        let found = match group.is_fake() {
            // Every rank is taken to be like this one.
            true => {
                let own = &counts[group.index() * each..][..each];
                own.repeat(group.size())
            }
            false => Vec::<i64>::try_from(&found)?,
        };
        Ok(Exchange {
            sent: counts
                .chunks(each)
                .map(|of_rank| of_rank.iter().sum())
                .collect(),
            received: found.chunks(each).map(<[i64]>::to_vec).collect(),
            group: Some(group.clone()),
        })
    }

    /// Rows that each of this rank's experts gets.
    pub(super) fn rows_of_experts(&self) -> Vec<i64> {
        let num_experts = self.received.first().map_or(0, Vec::len);
        let of_expert = |expert: usize| self.received.iter().map(|from| from[expert]).sum();
        (0..num_experts).map(of_expert).collect()
    }

    /// What goes with rows and has no gradient, as [`Exchange::dispatch`] would send it, but in the order in
    /// which it comes: for exchanges between ranks with one destination each.
    pub(super) fn accompany(&self, sorted: &Tensor) -> Result<Tensor> {
        let Some(way) = self.there() else {
            return Ok(sorted.shallow_clone());
        };
        let (out, work) = way.begin(sorted)?;
        work.wait()?;
        Ok(out)
    }

    /// From rows by expert of all ranks to the rows of this rank's experts, by expert.
    pub(super) fn dispatch(&self, rows: &Tensor) -> Result<Tensor> {
        let Some(way) = self.there() else {
            return Ok(rows.shallow_clone());
        };
        let arrived = start(way, rows)?.finish()?;
        if self.is_in_order() {
            return Ok(arrived);
        }
        let (by_expert, by_rank) = self.orders(&arrived)?;
        reordered(&arrived, by_expert, by_rank)
    }

    /// The way back, begun.
    pub(super) fn start_combine(&self, rows: &Tensor) -> Result<Returning> {
        let Some(way) = self.there() else {
            return Ok(Returning::Here(rows.shallow_clone()));
        };
        let mut rows = rows.shallow_clone();
        if !self.is_in_order() {
            let (by_expert, by_rank) = self.orders(&rows)?;
            rows = reordered(&rows, by_rank, by_expert)?;
        }
        let travelling = start(way.reversed(), &rows)?;
        Ok(Returning::Travelling(Box::new(travelling)))
    }

    /// The way to the experts, where there is one.
    fn there(&self) -> Option<Way> {
        Some(Way {
            group: self.group.clone()?,
            sent: self.sent.clone(),
            received: self.rows_from_each(),
            purpose: Purpose::Dispatch,
        })
    }

    /// Whether rows that come by rank are by expert already.
    fn is_in_order(&self) -> bool {
        self.received.first().is_some_and(|from| from.len() == 1)
    }

    fn rows_from_each(&self) -> Vec<i64> {
        self.received.iter().map(|from| from.iter().sum()).collect()
    }

    /// Which row comes next where rows are by expert, of those by rank; and the other way round.
    fn orders(&self, like: &Tensor) -> Result<(Tensor, Tensor)> {
        let (by_expert, by_rank) = orders(&self.received);
        let tensor = |order: &[i64]| -> Result<Tensor> {
            Ok(match meta::is_meta(like) {
                true => meta::empty(&[order.len() as i64], Kind::Int64)?,
                false => Tensor::f_from_slice(order)?.f_to_device(like.device())?,
            })
        };
        Ok((tensor(&by_expert)?, tensor(&by_rank)?))
    }
}

/// For rows that came by rank, and for each rank by expert: where each is taken from when they are put by
/// expert, and the inverse.
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
    for (place, &row) in by_expert.iter().enumerate() {
        by_rank[row as usize] = place as i64;
    }
    (by_expert, by_rank)
}

/// Rows in another order; backward puts gradients back into the first.
fn reordered(rows: &Tensor, order: Tensor, back: Tensor) -> Result<Tensor> {
    Ok(autograd::single(
        &[rows],
        |_, inputs| Ok(inputs[0].f_index_select(0, &order)?),
        move |_, gradients| match gradients {
            [Some(gradient)] => Ok(vec![Some(gradient.f_index_select(0, &back)?)]),
            _ => Ok(vec![None]),
        },
    )?)
}

/// Rows on their way back.
pub(super) enum Returning {
    /// They never left.
    Here(Tensor),
    /// From other ranks.
    Travelling(Box<Travelling>),
}

impl Returning {
    /// Waits for them.
    pub(super) fn finish(self) -> Result<Tensor> {
        match self {
            Returning::Here(rows) => Ok(rows),
            Returning::Travelling(rows) => rows.finish(),
        }
    }
}

/// Between whom how many rows go, and what for.
#[derive(Clone)]
struct Way {
    group: Group,
    /// To each rank.
    sent: Vec<i64>,
    /// From each rank.
    received: Vec<i64>,
    purpose: Purpose,
}

impl Way {
    /// The way back.
    fn reversed(self) -> Way {
        Way {
            sent: self.received,
            received: self.sent,
            purpose: match self.purpose {
                Purpose::Dispatch => Purpose::Combine,
                _ => Purpose::Dispatch,
            },
            ..self
        }
    }

    /// Begins to send rows and to receive others.
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

/// An exchange under way. It begins and ends in two functions of autograd, so that in backward, too,
/// others run between: the end's backward begins the exchange of gradients, and the beginning's waits.
pub(super) struct Travelling {
    way: Way,
    rows: Tensor,
    work: Work,
    /// The exchange of gradients, once it has begun.
    returning: Slot,
}

/// Gradients on their way. Autograd checks shapes from function to function, so they go past it.
type Slot = Arc<Mutex<Option<(Tensor, Work)>>>;

fn start(way: Way, rows: &Tensor) -> Result<Travelling> {
    let returning = Slot::default();
    let gradients_back = Arc::clone(&returning);
    let mut begun = None;
    let rows = autograd::single(
        &[rows],
        |_, inputs| {
            let (out, work) = way.begin(inputs[0])?;
            begun = Some(work);
            Ok(out)
        },
        move |_, _| {
            let begun = gradients_back
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
    let nothing = || TorchError::Invalid("an exchange that did not begin".to_owned());
    Ok(Travelling {
        way,
        rows,
        work: begun.ok_or_else(nothing)?,
        returning,
    })
}

impl Travelling {
    fn finish(self) -> Result<Tensor> {
        let Travelling {
            way,
            rows,
            work,
            returning,
        } = self;
        let back = way.reversed();
        Ok(autograd::single(
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
                *returning.lock().unwrap_or_else(|e| e.into_inner()) = Some(begun);
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
    fn rows_by_rank_are_put_by_expert() {
        // Two ranks; the first sends 1 and 2 rows for two experts, the second 2 and 0.
        let (by_expert, by_rank) = orders(&[vec![1, 2], vec![2, 0]]);
        assert_eq!(by_expert, [0, 3, 4, 1, 2]);
        assert_eq!(by_rank, [0, 3, 4, 1, 2]);
    }

    proptest! {
        #[test]
        fn orders_are_inverse_and_experts_follow_each_other(
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
            for (place, &row) in by_expert.iter().enumerate() {
                prop_assert_eq!(by_rank[row as usize], place as i64);
            }
        }
    }
}
