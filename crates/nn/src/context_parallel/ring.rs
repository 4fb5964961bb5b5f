//! Ring attention: keys and values move from rank to rank while queries stay.
//!
//! In hop `h` a rank has the keys and values of the rank `h` positions before it. It sends them on before it computes
//! with them, so that communication overlaps with computation. In backward, the gradients of keys and values follow:
//! each rank adds its contribution and sends them on, until they reach the rank that owns them.

use tch::Tensor;
use trainyard_torch::{Group, P2pOp, TorchError, Work, autograd};
use trainyard_trace::Purpose;

use super::block::{Gradients, PartialAttention, attend, attend_backward};
use super::zigzag::{MaskKind, mask_kind};
use crate::Result;

/// Separate tags keep keys and values apart from their gradients.
const VALUES: u16 = 1;
const GRADIENTS: u16 = 2;

/// Causal attention of this rank's queries to all keys, on [batch, heads, positions, head_dim].
pub(super) fn attention(group: &Group, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (ring, backward_ring) = (Ring(group.clone()), Ring(group.clone()));
    Ok(autograd::apply(
        &[q, k, v],
        |saver, inputs| {
            let (q, k, v) = (inputs[0], inputs[1], inputs[2]);
            let attended = ring.forward(q, &Tensor::f_stack(&[k, v], 0)?)?;
            let out = attended.out.f_to_kind(q.kind())?;
            for tensor in [q, k, v, &out, &attended.lse] {
                saver.save(tensor);
            }
            Ok(out)
        },
        move |saved, gradients| {
            let ([q, k, v, out, lse], [Some(gradient)]) = (saved, gradients) else {
                return Ok(vec![None, None, None]);
            };
            let full = PartialAttention {
                out: out.shallow_clone(),
                lse: lse.shallow_clone(),
            };
            let found =
                backward_ring.backward(gradient, q, &Tensor::f_stack(&[k, v], 0)?, &full)?;
            Ok(vec![Some(found.q), Some(found.k), Some(found.v)])
        },
    )?)
}

struct Ring(Group);

/// A tensor that is being received from the previous rank.
struct PendingRecv(Tensor, Work);

impl PendingRecv {
    fn wait(self) -> Result<Tensor, TorchError> {
        self.1.wait()?;
        Ok(self.0)
    }
}

impl Ring {
    /// Sends a tensor to the next rank and receives one from the previous rank.
    fn send_recv(&self, tensor: &Tensor, tag: u16) -> Result<PendingRecv, TorchError> {
        let (index, size) = (self.0.index(), self.0.size());
        let received = tensor.f_empty_like()?;
        let ops = [
            P2pOp::Send(tensor, (index + 1) % size),
            P2pOp::Recv(&received, (index + size - 1) % size),
        ];
        let work = self.0.batch_send_recv(&ops, tag, Purpose::Activation)?;
        Ok(PendingRecv(received, work))
    }

    /// Calls `on_block` in every hop with the hop's number, its mask, and the received keys and values.
    fn rotate(
        &self,
        own: &Tensor,
        mut on_block: impl FnMut(usize, MaskKind, &Tensor) -> Result<(), TorchError>,
    ) -> Result<(), TorchError> {
        let (index, size) = (self.0.index(), self.0.size());
        let mut current = own.shallow_clone();
        for hop in 0..size {
            let pending = if hop + 1 < size {
                Some(self.send_recv(&current, VALUES)?)
            } else {
                None
            };
            on_block(hop, mask_kind(index, (index + size - hop) % size), &current)?;
            if let Some(pending) = pending {
                current = pending.wait()?;
            }
        }
        Ok(())
    }

    fn forward(&self, q: &Tensor, kv: &Tensor) -> Result<PartialAttention, TorchError> {
        let mut merged: Option<PartialAttention> = None;
        self.rotate(kv, |_, mask, kv| {
            let Block { q, k, v, queries } = Block::new(mask, q, kv)?;
            let attended = attend(&q, &k, &v, mask.is_causal())?;
            match &merged {
                Some(merged) => merged.narrow(queries.0, queries.1)?.merge(&attended),
                None => {
                    merged = Some(attended.widened()?);
                    Ok(())
                }
            }
        })?;
        merged.ok_or_else(|| TorchError::Invalid("ring attention over an empty group".to_owned()))
    }

    fn backward(
        &self,
        gradient: &Tensor,
        q: &Tensor,
        kv: &Tensor,
        full: &PartialAttention,
    ) -> Result<Gradients, TorchError> {
        let d_q = q.f_zeros_like()?;
        let mut own = kv.f_zeros_like()?;
        let mut pending: Option<PendingRecv> = None;
        self.rotate(kv, |hop, mask, kv| {
            let Block { q, k, v, queries } = Block::new(mask, q, kv)?;
            let (start, length) = queries;
            let gradient = gradient.f_narrow(2, start, length)?;
            let full = full.narrow(start, length)?;
            let found = attend_backward(&gradient, (&q, &k, &v), &full, mask.is_causal())?;
            let _ = d_q.f_narrow(2, start, length)?.f_add_(&found.q)?;
            // The contributions of previous ranks. This rank's own contribution is added locally.
            let mut d_kv = match pending.take() {
                Some(pending) => pending.wait()?,
                None if hop == 0 => own.shallow_clone(),
                None => kv.f_zeros_like()?,
            };
            add_gradients(&mut d_kv, &found)?;
            if hop > 0 {
                pending = Some(self.send_recv(&d_kv, GRADIENTS)?);
            }
            Ok(())
        })?;
        if let Some(pending) = pending {
            own = own.f_add_(&pending.wait()?)?;
        }
        Ok(Gradients {
            q: d_q,
            k: own.f_select(0, 0)?,
            v: own.f_select(0, 1)?,
        })
    }
}

/// The queries, keys and values of one hop.
struct Block {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// The start and number of the queries.
    queries: (i64, i64),
}

impl Block {
    fn new(mask: MaskKind, q: &Tensor, kv: &Tensor) -> Result<Block, TorchError> {
        let length = q.size().get(2).copied().unwrap_or(0);
        let (queries, keys) = mask.ranges(length);
        let kv = kv.f_narrow(3, keys.0, keys.1)?;
        Ok(Block {
            q: q.f_narrow(2, queries.0, queries.1)?,
            k: kv.f_select(0, 0)?,
            v: kv.f_select(0, 1)?,
            queries,
        })
    }
}

/// Adds the gradients of a block. Keys without a gradient are at the end.
fn add_gradients(d_kv: &mut Tensor, found: &Gradients) -> Result<(), TorchError> {
    let num_keys = found.k.size().get(2).copied().unwrap_or(0);
    let used = d_kv.f_narrow(3, 0, num_keys)?;
    let _ = used.f_select(0, 0)?.f_add_(&found.k)?;
    let _ = used.f_select(0, 1)?.f_add_(&found.v)?;
    Ok(())
}
