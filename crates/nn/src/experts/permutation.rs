//! Token permutation: sorts the rows of tokens by expert, and back.
//!
//! Every token has one row per chosen expert. Rows are sorted by expert, and by token within each. Forward and
//! backward both gather rows by index in both directions, because scatter-add by index is slow and not deterministic.

use tch::{Device, Kind, Tensor};
use trainyard_torch::{TorchError, autograd, device, meta};

use super::count::count;
use super::router::Destinations;
use crate::Result;

impl Destinations {
    /// The number of rows of each expert. The host must know them to size the tensors that follow: this is the only
    /// place where a layer with experts waits for the device.
    fn counts(&self, ids: &Tensor) -> Result<Vec<i64>> {
        if !device::computes_values() {
            return Ok(self.expected.clone());
        }
        // Dropped rows have the id after the last expert, and sort last.
        let counts = count(ids, self.count as i64 + 1)?;
        let mut counts = Vec::<i64>::try_from(&counts.f_to_device(Device::Cpu)?)?;
        counts.truncate(self.count);
        Ok(counts)
    }
}

/// The permutation from rows by token to rows by expert.
pub(super) struct TokenPermutation {
    /// The number of rows of each expert, from this rank's tokens.
    pub counts: Vec<i64>,
    /// The index of each permuted row in the original order; dropped rows are absent.
    order: Tensor,
    /// The token of each permuted row.
    token: Tensor,
    /// The index of each original row in the permuted order; past the end for a dropped row.
    inverse: Tensor,
    /// The number of rows per token.
    rows_per_token: i64,
    drops: bool,
}

impl TokenPermutation {
    pub(super) fn new(to: &Destinations) -> Result<TokenPermutation> {
        let (num_tokens, rows_per_token) = to.ids.size2()?;
        let num_rows = num_tokens * rows_per_token;
        if meta::is_meta(&to.ids) {
            let num_sent: i64 = to.expected.iter().sum();
            return Ok(TokenPermutation {
                counts: to.expected.clone(),
                order: meta::empty(&[num_sent], Kind::Int64)?,
                token: meta::empty(&[num_sent], Kind::Int64)?,
                inverse: meta::empty(&[num_rows], Kind::Int64)?,
                rows_per_token,
                drops: false,
            });
        }
        tch::no_grad(|| {
            let ids = to.ids.f_reshape(-1i64)?;
            let counts = to.counts(&ids)?;
            let num_sent: i64 = counts.iter().sum();
            let (_, order) = ids.f_sort_stable(true, 0, false)?;
            let positions = Tensor::f_arange(num_rows, (Kind::Int64, order.device()))?;
            let inverse = order.f_empty_like()?.f_index_copy(0, &order, &positions)?;
            let order = order.f_narrow(0, 0, num_sent)?;
            Ok(TokenPermutation {
                counts,
                token: order.f_floor_divide_scalar(rows_per_token)?,
                order,
                inverse: inverse.f_clamp_max(num_sent)?,
                rows_per_token,
                drops: to.drops,
            })
        })
    }

    /// The rows of `tokens` [tokens, width], sorted by expert.
    pub(super) fn permute(&self, tokens: &Tensor) -> Result<Tensor> {
        let permutation = self.clone();
        Ok(autograd::apply(
            &[tokens],
            |_, inputs| Ok(inputs[0].f_index_select(0, &self.token)?),
            move |_, gradients| match gradients {
                [Some(gradient)] => {
                    let by_token = permutation.by_token(gradient)?;
                    let sum = by_token.f_sum_dim_intlist(1i64, false, by_token.kind())?;
                    Ok(vec![Some(sum)])
                }
                _ => Ok(vec![None]),
            },
        )?)
    }

    /// Permutes data of tokens [tokens, ..] that has no gradient.
    pub(super) fn permute_metadata(&self, of_tokens: &Tensor) -> Result<Tensor> {
        Ok(of_tokens.f_index_select(0, &self.token)?)
    }

    /// For every token, the sum of its rows times their weights [tokens, chosen].
    pub(super) fn unpermute_weighted(&self, rows: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let by_token = self.unpermute(rows)?;
        Ok(weights.f_unsqueeze(1)?.f_bmm(&by_token)?.f_squeeze_dim(1)?)
    }

    /// For every token, the sum of its rows.
    pub(super) fn unpermute_sum(&self, rows: &Tensor) -> Result<Tensor> {
        let by_token = self.unpermute(rows)?;
        Ok(by_token.f_sum_dim_intlist(1i64, false, by_token.kind())?)
    }

    /// Permuted rows back in token order [tokens, chosen, width].
    fn unpermute(&self, rows: &Tensor) -> Result<Tensor> {
        let permutation = self.clone();
        Ok(autograd::apply(
            &[rows],
            |_, inputs| self.by_token(inputs[0]),
            move |_, gradients| match gradients {
                [Some(gradient)] => {
                    let rows = gradient.f_flatten(0, 1)?;
                    Ok(vec![Some(rows.f_index_select(0, &permutation.order)?)])
                }
                _ => Ok(vec![None]),
            },
        )?)
    }

    /// Gathers permuted rows [rows, width] in token order [tokens, chosen, width]; zeros for dropped rows.
    fn by_token(&self, permuted: &Tensor) -> Result<Tensor, TorchError> {
        let rows = if self.drops {
            let zeros = meta::new_zeros(permuted, &[1, permuted.size2()?.1])?;
            Tensor::f_cat(&[permuted, &zeros], 0)?
        } else {
            permuted.shallow_clone()
        };
        let unsorted = rows.f_index_select(0, &self.inverse)?;
        Ok(unsorted.f_unflatten(0, [-1, self.rows_per_token])?)
    }
}

impl Clone for TokenPermutation {
    fn clone(&self) -> TokenPermutation {
        TokenPermutation {
            counts: self.counts.clone(),
            order: self.order.shallow_clone(),
            token: self.token.shallow_clone(),
            inverse: self.inverse.shallow_clone(),
            rows_per_token: self.rows_per_token,
            drops: self.drops,
        }
    }
}
