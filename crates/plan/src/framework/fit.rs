//! A strategy on its way into a framework: changed where it must be, with a note of every change.

use super::canonical::canonical;
use super::{Choice, Instead, Loss};
use crate::{Precision, Shape, Strategy};

/// What will be written, and what that loses.
pub(super) struct Fit {
    pub shape: Shape,
    pub strategy: Strategy,
    pub losses: Vec<Loss>,
}

impl Fit {
    /// Nothing lost so far. The strategy is in its canonical form from here on.
    pub fn new(shape: &Shape, strategy: &Strategy) -> Fit {
        Fit {
            shape: shape.clone(),
            strategy: canonical(strategy),
            losses: Vec::new(),
        }
    }

    /// Changes the strategy to the nearest thing that works, and notes it.
    pub fn change(
        &mut self,
        what: Choice,
        why: impl Into<String>,
        written: impl Into<String>,
        change: impl FnOnce(&mut Strategy),
    ) {
        change(&mut self.strategy);
        self.strategy = canonical(&self.strategy);
        self.note(what, why, Instead::Written(written.into()));
    }

    /// Notes something that the text cannot hold but the framework can do.
    pub fn elsewhere(&mut self, what: Choice, why: impl Into<String>, how: impl Into<String>) {
        self.note(what, why, Instead::Elsewhere(how.into()));
    }

    /// Changes the model to the nearest thing that works, and notes it.
    pub fn change_model(&mut self, why: impl Into<String>, written: impl Into<String>, to: Shape) {
        self.shape = to;
        self.note(Choice::Model, why, Instead::Written(written.into()));
    }

    /// Takes the nearest of the number types that there are.
    pub fn choose_precision(&mut self, offered: &[Precision], why: &str) {
        let wanted = self.strategy.precision;
        let Some(&nearest) = offered.iter().min_by_key(|p| distance(&wanted, p)) else {
            return;
        };
        if nearest == wanted {
            return;
        }
        let why = format!("{} is not offered: {why}", describe(&wanted));
        self.change(Choice::Precision, why, describe(&nearest), |s| {
            s.precision = nearest
        });
    }

    fn note(&mut self, what: Choice, why: impl Into<String>, instead: Instead) {
        let why = why.into();
        self.losses.push(Loss { what, why, instead });
    }
}

/// How unlike two choices of types are: what layers compute with counts most.
fn distance(a: &Precision, b: &Precision) -> [usize; 5] {
    [
        a.compute.abs_diff(b.compute),
        a.reduced.abs_diff(b.reduced),
        a.gradient.abs_diff(b.gradient),
        a.parameter.abs_diff(b.parameter),
        a.optimizer.abs_diff(b.optimizer),
    ]
}

/// The bytes, for people.
pub(super) fn describe(p: &Precision) -> String {
    let Precision {
        compute,
        parameter,
        gradient,
        reduced,
        optimizer,
    } = p;
    format!(
        "{compute} bytes computed with, {parameter} + {gradient} + {optimizer} of a parameter, its \
         gradient (reduced in {reduced}) and its optimiser's states"
    )
}
