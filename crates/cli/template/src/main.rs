//! A model and a dataset of your own, trained by Trainyard.
//!
//! The config chooses both by name. Their keys are in `[custom.mlp]` and `[custom.spirals]`, and reach this program as
//! the types below.

use std::process::ExitCode;

use serde::Deserialize;
use trainyard::data::{Array, DataError, Sample, Source};
use trainyard::nn::layers::Linear;
use trainyard::nn::{Result, cross_entropy_sum};
use trainyard::train::build::Phase;
use trainyard::{Builder, Config, Context, Init, Model, Module, Registry, Tensor, Unit};

fn main() -> ExitCode {
    let spirals = |phase, _: &Config, keys| Ok(Spirals { phase, keys });
    trainyard::train_main(
        Registry::builtin()
            .model("mlp", |builder, _, keys| Mlp::build(builder, &keys))
            .dataset("spirals", spirals),
    )
}

/// `[custom.mlp]`
#[derive(Deserialize)]
#[serde(default)]
struct MlpKeys {
    width: usize,
    num_hidden_layers: usize,
}

impl Default for MlpKeys {
    fn default() -> Self {
        MlpKeys {
            width: 64,
            num_hidden_layers: 2,
        }
    }
}

/// Dense layers. Strategies shard, gather and recompute a model unit by unit; here a unit is a layer.
#[derive(Module)]
struct Mlp {
    layers: Vec<Layer>,
}

impl Mlp {
    /// The builder creates parameters for this rank: on its device, in its types, and as the strategy needs them.
    fn build(builder: &Builder, keys: &MlpKeys) -> Result<Mlp> {
        let mut widths = vec![2];
        widths.extend(vec![keys.width; keys.num_hidden_layers]);
        widths.push(2);
        let layers = widths.windows(2).enumerate().map(|(index, widths)| {
            let builder = builder.push(&format!("layers.{index}"));
            Ok(Layer {
                name: builder.path().to_owned(),
                linear: Linear::with_bias(&builder, widths[0], widths[1], Init::fan_in(widths[0]))?,
                is_last: index == keys.num_hidden_layers,
            })
        });
        Ok(Mlp {
            layers: layers.collect::<Result<_>>()?,
        })
    }
}

impl Model for Mlp {
    fn units(&self) -> Vec<&dyn Unit> {
        self.layers.iter().map(|layer| layer as &dyn Unit).collect()
    }

    /// Summed, not averaged: Trainyard divides by the targets of all ranks.
    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        cross_entropy_sum(output, targets)
    }
}

#[derive(Module)]
struct Layer {
    name: String,
    linear: Linear,
    is_last: bool,
}

impl Unit for Layer {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        let output = self.linear.forward(x)?;
        Ok(if self.is_last {
            output
        } else {
            output.f_gelu("none")?
        })
    }
}

/// `[custom.spirals]`
#[derive(Deserialize)]
#[serde(default)]
struct SpiralKeys {
    num_turns: f32,
}

impl Default for SpiralKeys {
    fn default() -> Self {
        SpiralKeys { num_turns: 1.0 }
    }
}

/// Points on two interleaved spirals. A sample depends on its index alone, so it is the same on any number of ranks.
struct Spirals {
    phase: Phase,
    keys: SpiralKeys,
}

impl Source for Spirals {
    fn len(&self) -> Option<u64> {
        None
    }

    fn sample(&self, index: u64) -> std::result::Result<Sample, DataError> {
        // Validation has points between those of training.
        let between = if self.phase == Phase::Validation {
            0.5
        } else {
            0.0
        };
        let (label, position) = (index % 2, (index / 2 % 256) as f32 + between);
        let radius = (position + 1.0) / 256.0;
        let turned = std::f32::consts::PI * (2.0 * self.keys.num_turns * radius + label as f32);
        Ok(Sample {
            inputs: Array::floats(vec![radius * turned.cos(), radius * turned.sin()]),
            targets: Array::int(label as i64),
        })
    }
}
