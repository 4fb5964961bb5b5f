//! Adapts a strategy to what a framework can express, and records every change.

use super::canonical::canonical;
use super::{Deviation, Resolution, Setting};
use trainyard_arch::{DecoderConfig, Norm, NormPlacement, QkNorm};
use trainyard_plan::{Precision, Strategy, Synchronization};

/// The model and strategy to write, and their deviations from the request.
pub(super) struct Adapted {
    pub shape: DecoderConfig,
    pub strategy: Strategy,
    pub deviations: Vec<Deviation>,
}

impl Adapted {
    /// Starts without deviations. The strategy is kept in canonical form.
    pub fn new(shape: &DecoderConfig, strategy: &Strategy) -> Adapted {
        Adapted {
            shape: shape.clone(),
            strategy: canonical(strategy),
            deviations: Vec::new(),
        }
    }

    /// Changes the strategy to the nearest one that the framework can express, and records the deviation.
    pub fn change(
        &mut self,
        what: Setting,
        why: impl Into<String>,
        written: impl Into<String>,
        change: impl FnOnce(&mut Strategy),
    ) {
        change(&mut self.strategy);
        self.strategy = canonical(&self.strategy);
        self.note(what, why, Resolution::Approximated(written.into()));
    }

    /// Takes uncompressed gradients that are averaged in every step, if the config cannot express anything else.
    pub fn synchronize_in_every_step(&mut self) {
        let wanted = self.strategy.synchronization;
        if wanted == Synchronization::PLAIN {
            return;
        }
        let why = format!("the config has no keys for \"{wanted}\"");
        let written = "gradients that are averaged over all replicas in every step";
        self.change(Setting::Synchronization, why, written, |s| {
            s.synchronization = Synchronization::PLAIN;
        });
    }

    /// Records a setting that the framework supports, but that is set outside the config.
    pub fn set_elsewhere(&mut self, what: Setting, why: impl Into<String>, how: impl Into<String>) {
        self.note(what, why, Resolution::SetElsewhere(how.into()));
    }

    /// Changes the model to the nearest one that the framework can express, and records the deviation.
    pub fn change_model(
        &mut self,
        why: impl Into<String>,
        written: impl Into<String>,
        to: DecoderConfig,
    ) {
        self.shape = to;
        self.note(
            Setting::Model,
            why,
            Resolution::Approximated(written.into()),
        );
    }

    /// Takes the model without the details of its family that the framework's config does not express.
    pub fn leave_out_family_details(&mut self) {
        let shape = &self.shape;
        let details = [
            (
                shape.norm_placement != NormPlacement::Before,
                "norms of the outputs of attention and feed-forward layers",
            ),
            (
                shape.norm == Norm::RootMeanSquarePlusOne,
                "scales of one more than their weight",
            ),
            (
                shape.qk_norm == Some(QkNorm::AllHeads),
                "one norm of all heads",
            ),
            (shape.sliding_window.is_some(), "sliding windows"),
        ];
        let has = details.iter().filter(|(has, _)| *has);
        let names: Vec<_> = has.map(|(_, name)| *name).collect();
        if names.is_empty() {
            return;
        }
        let plain = DecoderConfig {
            norm_placement: NormPlacement::Before,
            norm: match shape.norm {
                Norm::RootMeanSquarePlusOne => Norm::RootMeanSquare,
                norm => norm,
            },
            qk_norm: shape.qk_norm.map(|_| QkNorm::Head),
            sliding_window: None,
            ..shape.clone()
        };
        let why = format!("the config has no keys for {}", names.join(", "));
        self.change_model(why, "a Llama of the same sizes", plain);
    }

    /// Takes the nearest precision that the framework offers.
    pub fn choose_precision(&mut self, offered: &[Precision], why: &str) {
        let wanted = self.strategy.precision;
        let Some(&nearest) = offered.iter().min_by_key(|p| distance(&wanted, p)) else {
            return;
        };
        if nearest == wanted {
            return;
        }
        let why = format!("{} is not available: {why}", describe(&wanted));
        self.change(Setting::Precision, why, describe(&nearest), |s| {
            s.precision = nearest
        });
    }

    fn note(&mut self, setting: Setting, reason: impl Into<String>, resolution: Resolution) {
        let reason = reason.into();
        self.deviations.push(Deviation {
            setting,
            reason,
            resolution,
        });
    }
}

/// The distance between two precisions, for lexicographic comparison: the compute type comes first.
fn distance(a: &Precision, b: &Precision) -> [usize; 5] {
    [
        a.compute.abs_diff(b.compute),
        a.reduced.abs_diff(b.reduced),
        a.gradient.abs_diff(b.gradient),
        a.parameter.abs_diff(b.parameter),
        a.optimizer.abs_diff(b.optimizer),
    ]
}

/// The precision as text for messages.
pub(super) fn describe(p: &Precision) -> String {
    let Precision {
        compute,
        parameter,
        gradient,
        reduced,
        optimizer,
    } = p;
    format!(
        "{compute}-byte compute with {parameter} bytes of weight, {gradient} of gradient (reduced in \
         {reduced}) and {optimizer} of optimizer state per parameter"
    )
}
