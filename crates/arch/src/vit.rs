//! A vision transformer: an encoder of the patches of an image.

use serde::{Deserialize, Serialize};

use crate::DecoderConfig;

/// A vision transformer that classifies images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VitConfig {
    /// The encoder of patches. Its vocabulary are the classes, and its positions the patches.
    pub encoder: DecoderConfig,
    /// Width and height of an image.
    pub image_size: usize,
    /// Width and height of a patch; divides that of an image.
    pub patch_size: usize,
    /// Channels of an image.
    pub num_channels: usize,
}

impl VitConfig {
    /// One for the ten digits of MNIST: 28 x 28 pixels in 16 patches.
    pub fn mnist() -> VitConfig {
        VitConfig {
            encoder: DecoderConfig {
                name: "vit".to_owned(),
                is_causal: false,
                ..DecoderConfig::gpt(4, 64, 4, 10, 16)
            },
            image_size: 28,
            patch_size: 7,
            num_channels: 1,
        }
    }

    /// The patches of an image.
    pub fn num_patches(&self) -> usize {
        let along = self.image_size / self.patch_size.max(1);
        along * along
    }

    /// The number of parameters.
    pub fn num_parameters(&self) -> u64 {
        let [width, inner, layers] = [
            self.encoder.hidden_size,
            self.encoder.intermediate_size,
            self.encoder.num_hidden_layers,
        ]
        .map(|size| size as u64);
        let [patches, classes] = [self.num_patches(), self.encoder.vocab_size].map(|n| n as u64);
        let patch = (self.num_channels * self.patch_size * self.patch_size) as u64;
        let linear = |from: u64, to: u64| from * to + to;
        let norm = 2 * width;
        let attention = linear(width, 3 * width) + linear(width, width);
        let block = 2 * norm + attention + linear(width, inner) + linear(inner, width);
        linear(patch, width) + patches * width + layers * block + norm + linear(width, classes)
    }

    /// Operations of a training step per image, without those of attention scores.
    pub fn flops_per_image(&self) -> f64 {
        6.0 * self.num_parameters() as f64 * self.num_patches() as f64
    }
}
