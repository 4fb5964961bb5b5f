//! The gradients of several parameters as views of one flat tensor.

use tch::Tensor;
use trainyard_torch::{Result, autograd, storage};

use super::FlatParam;
use super::flat_tensor::view_as;

/// A flat gradient, and how far the current pass has filled it.
pub(crate) struct FlatGrads {
    flat: Tensor,
    members: Vec<Member>,
    /// Whether the leaves' gradients are the views themselves, so that autograd accumulates in the flat tensor.
    /// Otherwise gradients are moved into it from the leaves.
    in_place: bool,
}

/// A parameter, and its view of the flat gradient.
struct Member {
    name: String,
    leaf: Tensor,
    view: Tensor,
    is_ready: bool,
}

impl FlatGrads {
    /// The gradients of `leaves`, with their names, in `flat`, laid out as `layout`.
    pub(crate) fn new<'a>(
        flat: Tensor,
        layout: &FlatParam,
        leaves: impl Iterator<Item = (&'a str, &'a Tensor)>,
        in_place: bool,
    ) -> Result<FlatGrads> {
        let members = leaves.enumerate().map(|(number, (name, leaf))| {
            Ok(Member {
                name: name.to_owned(),
                leaf: leaf.shallow_clone(),
                view: view_as(&flat, layout.interval(number), leaf)?,
                is_ready: false,
            })
        });
        Ok(FlatGrads {
            members: members.collect::<Result<_>>()?,
            flat,
            in_place,
        })
    }

    /// The flat gradient.
    pub(crate) fn flat(&self) -> &Tensor {
        &self.flat
    }

    /// Every parameter's view of the flat gradient, in order.
    pub(crate) fn views(&self) -> impl Iterator<Item = &Tensor> {
        self.members.iter().map(|member| &member.view)
    }

    /// Whether autograd accumulates in the flat tensor.
    pub(crate) fn is_in_place(&self) -> bool {
        self.in_place
    }

    /// The leaves and their names, in order.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let members = self.members.iter();
        members.map(|member| (member.name.as_str(), &member.leaf))
    }

    /// Begins a pass, in which no gradient is ready yet.
    pub(crate) fn begin_pass(&mut self) {
        for member in &mut self.members {
            member.is_ready = false;
        }
    }

    /// Whether no gradient of this pass is ready.
    pub(crate) fn is_untouched(&self) -> bool {
        self.members.iter().all(|member| !member.is_ready)
    }

    /// Whether all gradients of this pass are ready.
    pub(crate) fn is_complete(&self) -> bool {
        self.members.iter().all(|member| member.is_ready)
    }

    /// Takes over a leaf's gradient, which autograd has accumulated.
    pub(crate) fn set_ready(&mut self, number: usize) -> Result<()> {
        let member = &mut self.members[number];
        let gradient = member.leaf.f_grad()?;
        // The hook also runs if no gradient arrived: the flat tensor still has that of the step before.
        if self.in_place && !gradient.defined() {
            return Ok(());
        }
        let was_ready = std::mem::replace(&mut member.is_ready, true);
        if !gradient.defined() || storage::is_shared(&gradient, &member.view)? {
            return Ok(());
        }
        let mut view = member.view.shallow_clone();
        // A gradient that stays with its leaf is the whole one. One that is moved arrives again if recomputed parts of a
        // unit share the parameter, or if passes are deferred.
        let adds = was_ready && !self.in_place;
        tch::no_grad(|| {
            if adds {
                view.f_add_(&gradient).map(drop)
            } else {
                view.f_copy_(&gradient)
            }
        })?;
        if self.in_place {
            autograd::set_grad(&member.leaf, &member.view)
        } else {
            autograd::clear_grad(&member.leaf)
        }
    }

    /// Names of parameters without a gradient, neither of this pass nor accumulated before.
    pub(crate) fn missing(&self) -> Vec<String> {
        let missing = self.members.iter().filter(|m| self.is_missing(m));
        missing.map(|member| member.name.clone()).collect()
    }

    /// Sets missing gradients to zero, which makes all gradients ready.
    pub(crate) fn zero_missing(&mut self) -> Result<()> {
        for number in 0..self.members.len() {
            let member = &self.members[number];
            if self.is_missing(member) {
                let _ = tch::no_grad(|| member.view.shallow_clone().f_zero_())?;
                if self.in_place {
                    autograd::set_grad(&member.leaf, &member.view)?;
                }
            }
            self.members[number].is_ready = true;
        }
        Ok(())
    }

    fn is_missing(&self, member: &Member) -> bool {
        !(member.is_ready || self.in_place && member.leaf.grad().defined())
    }

    /// Clears the gradients of all leaves.
    pub(crate) fn clear(&self) -> Result<()> {
        self.leaves()
            .try_for_each(|(_, leaf)| autograd::clear_grad(leaf))
    }

    /// Copies the leaves' values into the flat tensor, lets `act` change it, and copies them back.
    pub(crate) fn with_values(&self, act: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
        for Member { leaf, view, .. } in &self.members {
            tch::no_grad(|| view.shallow_clone().f_copy_(leaf))?;
        }
        act(&self.flat)?;
        for Member { leaf, view, .. } in &self.members {
            tch::no_grad(|| leaf.shallow_clone().f_copy_(view))?;
        }
        Ok(())
    }
}
