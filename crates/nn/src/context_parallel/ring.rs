//! Ring attention: keys and values go from rank to rank while queries stay.
//!
//! In hop `h` a rank has the keys and values of the rank `h` places before it. It passes them on
//! before it computes with them, so that a hop's journey takes place behind its computation. In
//! backward, gradients of keys and values follow: each rank adds its share and passes them on, until
//! they are home.

use tch::Tensor;
use trainyard_torch::{Group, Message, TorchError, Work, autograd};
use trainyard_trace::Purpose;

use super::block::{Attended, Gradients, attend, attend_backward};
use super::order::{Sight, sight};
use crate::Result;

/// Keys and values, and their gradients, must not be taken for each other.
const VALUES: u16 = 1;
const GRADIENTS: u16 = 2;

/// Causal attention of this rank's queries to all keys, on [batch, heads, positions, head_dim].
pub(super) fn attention(group: &Group, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (ring, later) = (Ring(group.clone()), Ring(group.clone()));
    Ok(autograd::single(
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
            let whole = Attended {
                out: out.shallow_clone(),
                lse: lse.shallow_clone(),
            };
            let found = later.backward(gradient, q, &Tensor::f_stack(&[k, v], 0)?, &whole)?;
            Ok(vec![Some(found.q), Some(found.k), Some(found.v)])
        },
    )?)
}

struct Ring(Group);

/// A tensor on its way from the rank before.
struct Coming(Tensor, Work);

impl Coming {
    fn arrived(self) -> Result<Tensor, TorchError> {
        self.1.wait()?;
        Ok(self.0)
    }
}

impl Ring {
    /// Sends a tensor to the rank after this one; the rank before sends its own.
    fn pass(&self, tensor: &Tensor, tag: u16) -> Result<Coming, TorchError> {
        let (index, size) = (self.0.index(), self.0.size());
        let coming = tensor.f_empty_like()?;
        let messages = [
            Message::Send(tensor, (index + 1) % size),
            Message::Recv(&coming, (index + size - 1) % size),
        ];
        let work = self.0.batch(&messages, tag, Purpose::Activation)?;
        Ok(Coming(coming, work))
    }

    /// Calls `meet` in every hop with the number of the hop and what came round.
    fn go_round(
        &self,
        own: &Tensor,
        mut meet: impl FnMut(usize, Sight, &Tensor) -> Result<(), TorchError>,
    ) -> Result<(), TorchError> {
        let (index, size) = (self.0.index(), self.0.size());
        let mut here = own.shallow_clone();
        for hop in 0..size {
            let coming = match hop + 1 < size {
                true => Some(self.pass(&here, VALUES)?),
                false => None,
            };
            meet(hop, sight(index, (index + size - hop) % size), &here)?;
            if let Some(coming) = coming {
                here = coming.arrived()?;
            }
        }
        Ok(())
    }

    fn forward(&self, q: &Tensor, kv: &Tensor) -> Result<Attended, TorchError> {
        let mut merged: Option<Attended> = None;
        self.go_round(kv, |_, sight, kv| {
            let Meeting { q, k, v, queries } = Meeting::new(sight, q, kv)?;
            let attended = attend(&q, &k, &v, sight.is_causal())?;
            match &merged {
                Some(merged) => merged.narrow(queries.0, queries.1)?.merge(&attended),
                None => {
                    merged = Some(attended.widened()?);
                    Ok(())
                }
            }
        })?;
        merged.ok_or_else(|| TorchError::Invalid("a ring of no ranks".to_owned()))
    }

    fn backward(
        &self,
        gradient: &Tensor,
        q: &Tensor,
        kv: &Tensor,
        whole: &Attended,
    ) -> Result<Gradients, TorchError> {
        let d_q = q.f_zeros_like()?;
        let mut own = kv.f_zeros_like()?;
        let mut coming: Option<Coming> = None;
        self.go_round(kv, |hop, sight, kv| {
            let Meeting { q, k, v, queries } = Meeting::new(sight, q, kv)?;
            let (start, length) = queries;
            let gradient = gradient.f_narrow(2, start, length)?;
            let whole = whole.narrow(start, length)?;
            let found = attend_backward(&gradient, (&q, &k, &v), &whole, sight.is_causal())?;
            let _ = d_q.f_narrow(2, start, length)?.f_add_(&found.q)?;
            // What ranks before this one have added; the rank's own share never leaves it.
            let mut shares = match coming.take() {
                Some(coming) => coming.arrived()?,
                None if hop == 0 => own.shallow_clone(),
                None => kv.f_zeros_like()?,
            };
            add_share(&mut shares, &found)?;
            if hop > 0 {
                coming = Some(self.pass(&shares, GRADIENTS)?);
            }
            Ok(())
        })?;
        if let Some(coming) = coming {
            own = own.f_add_(&coming.arrived()?)?;
        }
        Ok(Gradients {
            q: d_q,
            k: own.f_select(0, 0)?,
            v: own.f_select(0, 1)?,
        })
    }
}

/// The queries and the keys and values that meet in one hop.
struct Meeting {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// Where the queries begin and how many there are.
    queries: (i64, i64),
}

impl Meeting {
    fn new(sight: Sight, q: &Tensor, kv: &Tensor) -> Result<Meeting, TorchError> {
        let length = q.size().get(2).copied().unwrap_or(0);
        let (queries, keys) = sight.ranges(length);
        let kv = kv.f_narrow(3, keys.0, keys.1)?;
        Ok(Meeting {
            q: q.f_narrow(2, queries.0, queries.1)?,
            k: kv.f_select(0, 0)?,
            v: kv.f_select(0, 1)?,
            queries,
        })
    }
}

/// Keys that nobody saw have no share: they are at the end.
fn add_share(shares: &mut Tensor, found: &Gradients) -> Result<(), TorchError> {
    let num_keys = found.k.size().get(2).copied().unwrap_or(0);
    let seen = shares.f_narrow(3, 0, num_keys)?;
    let _ = seen.f_select(0, 0)?.f_add_(&found.k)?;
    let _ = seen.f_select(0, 1)?.f_add_(&found.v)?;
    Ok(())
}
