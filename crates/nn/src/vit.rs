//! A vision transformer: the blocks of an encoder over the patches of an image, and the mean of their outputs as the input of
//! the classifier.

use tch::Tensor;
use trainyard_arch::VitConfig;

use crate::{
    Builder, Context, Init, Model, Module, Parameter, Result, Unit, cross_entropy_sum, gpt2,
    layers::{LayerNorm, Linear},
};

/// The standard deviation of initial weights.
const STD: f64 = 0.02;

/// A vision transformer. Tensor-parallel ranks shard its blocks; every rank has all positions.
#[derive(Module)]
pub struct Vit {
    units: Vec<Box<dyn Unit>>,
    /// Whether blocks communicate.
    is_sharded: bool,
}

impl Vit {
    /// Builds the model.
    pub fn build(config: &VitConfig, builder: &Builder) -> Result<Vit> {
        let tp = builder.tensor_parallel().without_sequence_parallel();
        let is_sharded = tp.size() > 1;
        let root = builder.clone().with_tensor_parallel(tp);
        let trunk = root.push("vit");
        let mut units: Vec<Box<dyn Unit>> = vec![Box::new(PatchEmbed::build(
            config,
            &trunk.push("embeddings"),
        )?)];
        for index in 0..config.encoder.num_hidden_layers {
            let builder = trunk.push(&format!("encoder.layer.{index}"));
            let block = gpt2::block(&config.encoder, config.num_patches(), &builder)?;
            units.push(Box::new(block));
        }
        units.push(Box::new(Classifier::build(config, &root, &trunk)?));
        Ok(Vit { units, is_sharded })
    }
}

impl Model for Vit {
    fn units(&self) -> Vec<&dyn Unit> {
        self.units.iter().map(|unit| &**unit).collect()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        cross_entropy_sum(output, targets)
    }

    fn layer_comm_bytes(&self, _num_tokens: u64) -> Option<u64> {
        (!self.is_sharded).then_some(0)
    }
}

/// The embedding of patches: a linear map of their pixels, and their position.
#[derive(Module, Debug)]
struct PatchEmbed {
    name: String,
    weight: Parameter,
    bias: Parameter,
    position_embeddings: Parameter,
    patch_size: i64,
}

impl PatchEmbed {
    fn build(config: &VitConfig, builder: &Builder) -> Result<PatchEmbed> {
        let (width, side) = (config.encoder.hidden_size, config.patch_size);
        let projection = builder.push("patch_embeddings.projection");
        let init = Init::with_std(STD);
        let shape = [width, config.num_channels, side, side];
        let positions = [config.num_patches(), width];
        Ok(PatchEmbed {
            name: builder.path().to_owned(),
            weight: projection.parameter("weight", &shape, init)?,
            bias: projection.parameter("bias", &[width], Init::Zeros)?,
            position_embeddings: builder.parameter("position_embeddings", &positions, init)?,
            patch_size: side as i64,
        })
    }
}

impl Unit for PatchEmbed {
    fn name(&self) -> &str {
        &self.name
    }

    /// From [batch, channels, height, width] to [batch, patches, hidden].
    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        let side = [self.patch_size, self.patch_size];
        let patches = x.f_to_kind(self.weight.compute_kind())?.f_conv2d(
            &self.weight.value()?,
            Some(self.bias.value()?),
            side,
            [0, 0],
            [1, 1],
            1,
        )?;
        let patches = patches.f_flatten(2, -1)?.f_transpose(1, 2)?;
        Ok(patches.f_add(&self.position_embeddings.value()?)?)
    }
}

/// The final norm, the mean over patches, and the classifier.
#[derive(Module, Debug)]
struct Classifier {
    name: String,
    norm: LayerNorm,
    classifier: Linear,
}

impl Classifier {
    fn build(config: &VitConfig, root: &Builder, trunk: &Builder) -> Result<Classifier> {
        let encoder = &config.encoder;
        let (width, num_classes) = (encoder.hidden_size, encoder.vocab_size);
        let builder = root.push("classifier");
        Ok(Classifier {
            name: builder.path().to_owned(),
            norm: LayerNorm::build(&trunk.push("layernorm"), width, encoder.norm_eps)?,
            classifier: Linear::with_bias(&builder, width, num_classes, Init::fan_in(width))?,
        })
    }
}

impl Unit for Classifier {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        let mean = self
            .norm
            .forward(x)?
            .f_mean_dim([1i64].as_slice(), false, x.kind())?;
        self.classifier.forward(&mean)
    }
}
