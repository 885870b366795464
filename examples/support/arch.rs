//! The networks of the studies, and the images that their checkpoints were trained on.

use std::error::Error;
use std::path::Path;

use clap::ValueEnum;

use super::cifar::{self, CifarFiles};
use super::image_set::ImageSet;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    /// Three linear layers.
    Mlpnet,
    /// A residual network of 20 layers.
    Resnet20,
}

impl Arch {
    /// The data, normalized as the checkpoints were trained; without a folder the embedded digits.
    pub(crate) fn images(
        self,
        data: Option<&Path>,
        files: CifarFiles,
    ) -> Result<ImageSet, Box<dyn Error>> {
        Ok(match (self, data) {
            (Self::Resnet20, None) => return Err("`--arch resnet20` needs `--data`".into()),
            (Self::Resnet20, Some(dir)) => cifar::read(dir, files)?.normalized_as_cifar10(),
            (Self::Mlpnet, None) => ImageSet::digits(),
            (Self::Mlpnet, dir) => ImageSet::load(dir)?.normalized_as_mnist(),
        })
    }
}
