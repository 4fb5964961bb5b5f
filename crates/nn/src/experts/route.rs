//! Rows by expert: from tokens to what each expert computes, and back.
//!
//! Every token makes as many rows as it goes to experts. Rows are sorted by expert, in the order of
//! tokens within each. Both directions pick rows by index, in forward and in backward, for adding rows up
//! by index is slow and its order is not always the same.

use tch::{Kind, Tensor};
use trainyard_torch::{TorchError, autograd, meta};

use super::router::Destinations;
use crate::Result;

/// The way of every row.
pub(super) struct Route {
    /// Rows each expert gets, of this rank's tokens.
    pub counts: Vec<i64>,
    /// Which row of the unsorted each sorted one is; those that go nowhere are left out.
    order: Tensor,
    /// Which token each sorted one is of.
    token: Tensor,
    /// Where each unsorted row is among the sorted ones; after the last where it goes nowhere.
    place: Tensor,
    /// Rows of a token.
    each: i64,
    drops: bool,
}

impl Route {
    pub(super) fn new(to: &Destinations) -> Result<Route> {
        let (num_tokens, each) = to.numbers.size2()?;
        let num_rows = num_tokens * each;
        if meta::is_meta(&to.numbers) {
            let num_sent: i64 = to.expected.iter().sum();
            return Ok(Route {
                counts: to.expected.clone(),
                order: meta::empty(&[num_sent], Kind::Int64)?,
                token: meta::empty(&[num_sent], Kind::Int64)?,
                place: meta::empty(&[num_rows], Kind::Int64)?,
                each,
                drops: false,
            });
        }
        tch::no_grad(|| {
            let numbers = to.numbers.f_reshape(-1i64)?;
            let counts = numbers.f_bincount(None::<&Tensor>, to.number as i64)?;
            let mut counts = Vec::<i64>::try_from(&counts)?;
            // What goes nowhere comes last.
            counts.truncate(to.number);
            let num_sent: i64 = counts.iter().sum();
            let (_, order) = numbers.f_sort_stable(true, 0, false)?;
            let positions = Tensor::f_arange(num_rows, (Kind::Int64, order.device()))?;
            let place = order.f_empty_like()?.f_index_copy(0, &order, &positions)?;
            let order = order.f_narrow(0, 0, num_sent)?;
            Ok(Route {
                counts,
                token: order.f_floor_divide_scalar(each)?,
                order,
                place: place.f_clamp_max(num_sent)?,
                each,
                drops: to.drops,
            })
        })
    }

    /// The rows of `tokens` [tokens, width], sorted.
    pub(super) fn sorted(&self, tokens: &Tensor) -> Result<Tensor> {
        let later = self.clone();
        Ok(autograd::single(
            &[tokens],
            |_, inputs| Ok(inputs[0].f_index_select(0, &self.token)?),
            move |_, gradients| match gradients {
                [Some(gradient)] => {
                    let by_token = later.by_token(gradient)?;
                    let sum = by_token.f_sum_dim_intlist(1i64, false, by_token.kind())?;
                    Ok(vec![Some(sum)])
                }
                _ => Ok(vec![None]),
            },
        )?)
    }

    /// What belongs to tokens [tokens, ..] and has no gradient, sorted.
    pub(super) fn picked(&self, of_tokens: &Tensor) -> Result<Tensor> {
        Ok(of_tokens.f_index_select(0, &self.token)?)
    }

    /// For every token the sum of its rows, each times its weight [tokens, chosen].
    pub(super) fn combined(&self, rows: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let by_token = self.unsorted(rows)?;
        Ok(weights.f_unsqueeze(1)?.f_bmm(&by_token)?.f_squeeze_dim(1)?)
    }

    /// For every token the sum of its rows.
    pub(super) fn summed(&self, rows: &Tensor) -> Result<Tensor> {
        let by_token = self.unsorted(rows)?;
        Ok(by_token.f_sum_dim_intlist(1i64, false, by_token.kind())?)
    }

    /// Sorted rows by token [tokens, chosen, width].
    fn unsorted(&self, rows: &Tensor) -> Result<Tensor> {
        let later = self.clone();
        Ok(autograd::single(
            &[rows],
            |_, inputs| self.by_token(inputs[0]),
            move |_, gradients| match gradients {
                [Some(gradient)] => {
                    let rows = gradient.f_flatten(0, 1)?;
                    Ok(vec![Some(rows.f_index_select(0, &later.order)?)])
                }
                _ => Ok(vec![None]),
            },
        )?)
    }

    /// Sorted rows [rows, width] by token [tokens, chosen, width]; zeros for those that went nowhere.
    fn by_token(&self, sorted: &Tensor) -> Result<Tensor, TorchError> {
        let rows = match self.drops {
            true => {
                let nothing = meta::new_zeros(sorted, &[1, sorted.size2()?.1])?;
                Tensor::f_cat(&[sorted, &nothing], 0)?
            }
            false => sorted.shallow_clone(),
        };
        let unsorted = rows.f_index_select(0, &self.place)?;
        Ok(unsorted.f_unflatten(0, [-1, self.each])?)
    }
}

impl Clone for Route {
    fn clone(&self) -> Route {
        Route {
            counts: self.counts.clone(),
            order: self.order.shallow_clone(),
            token: self.token.shallow_clone(),
            place: self.place.shallow_clone(),
            each: self.each,
            drops: self.drops,
        }
    }
}
