//! Where the images and the checkpoint of a recipe are.

use std::error::Error;
use std::path::{Path, PathBuf};

use flate2::Crc;
use serde::{Deserialize, Serialize};

use crate::support::{self, CifarFiles, ImageSet, Images};

/// The network to train.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NetworkName {
    /// Convolutions and attention, for the digits and MNIST.
    #[default]
    Attention,
    /// Three linear layers, for the digits and MNIST.
    MlpNet,
    /// For CIFAR-10.
    ResNet20,
}

/// The table `task` of the file.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TaskTable {
    pub(crate) network: NetworkName,
    /// Weights with PyTorch's names: a path, from the folder of the recipe or of the data.
    pub(crate) checkpoint: Option<PathBuf>,
    pub(crate) batch_size: usize,
    /// Training and test images, at most.
    pub(crate) limit: Option<usize>,
    pub(crate) test_limit: Option<usize>,
    /// Move and mirror the training images at random.
    pub(crate) augment: bool,
}

impl Default for TaskTable {
    fn default() -> Self {
        Self {
            network: NetworkName::Attention,
            checkpoint: None,
            batch_size: 32,
            limit: None,
            test_limit: None,
            augment: false,
        }
    }
}

/// What the models of a run depend on beside its recipe.
#[derive(Debug, Serialize)]
pub(crate) struct Identity<'a> {
    task: &'a TaskTable,
    /// Training and test images.
    images: [usize; 2],
    /// CRC-32 of the pixels of both.
    pixels: [u32; 2],
    /// CRC-32 of the labels of both.
    labels: [u32; 2],
}

fn checksum<const N: usize>(numbers: impl Iterator<Item = [u8; N]>) -> u32 {
    let mut crc = Crc::new();
    numbers.for_each(|bytes| crc.update(&bytes));
    crc.sum()
}

impl TaskTable {
    /// The table with what tells these images from others.
    pub(crate) fn identity(&self, images: &ImageSet) -> Identity<'_> {
        let sets = [&images.train, &images.test];
        Identity {
            task: self,
            images: sets.map(Images::len),
            pixels: sets
                .map(|images| checksum(images.pixels().iter().map(|pixel| pixel.to_le_bytes()))),
            labels: sets
                .map(|images| checksum(images.labels().iter().map(|label| label.to_le_bytes()))),
        }
    }

    /// The images of the network, from `data` or from the folder of their name in it.
    pub(crate) fn images(&self, data: Option<&Path>) -> Result<ImageSet, Box<dyn Error>> {
        if self.batch_size == 0 {
            return Err("`task.batch_size` must be at least 1".into());
        }
        let inside = |data: &Path, name: &str| match data.join(name) {
            folder if folder.is_dir() => folder,
            _ => data.to_path_buf(),
        };
        let mut images = match (self.network, data) {
            (NetworkName::ResNet20, None) => {
                return Err("the network `resnet20` needs `--data` with CIFAR-10".into());
            }
            (NetworkName::ResNet20, Some(data)) => {
                let folder = inside(data, "cifar10");
                support::read_cifar(&folder, CifarFiles::Standard)?.normalized_as_cifar10()
            }
            (NetworkName::MlpNet, Some(data)) => {
                ImageSet::load(Some(&inside(data, "mnist")))?.normalized_as_mnist()
            }
            (_, data) => {
                let folder = data.map(|data| inside(data, "mnist"));
                ImageSet::load(folder.as_deref())?
            }
        };
        if let Some(limit) = self.limit {
            if limit < 2 {
                return Err("`task.limit` is below 2: too few images to train on".into());
            }
            images.train = images.train.take(limit);
        }
        if let Some(limit) = self.test_limit {
            if limit == 0 {
                return Err("`task.test_limit` is 0: nothing could be tested".into());
            }
            images.test = images.test.take(limit);
        }
        if self.augment {
            images.train = images.train.augmented();
        }
        Ok(images)
    }

    /// The checkpoint, wherever it lies: beside the recipe, in the data or in a folder `checkpoints`
    /// beside it.
    pub(crate) fn checkpoint(
        &self,
        config: Option<&Path>,
        data: Option<&Path>,
    ) -> Result<Option<PathBuf>, String> {
        let Some(name) = &self.checkpoint else {
            return Ok(None);
        };
        let mut folders = vec![PathBuf::new()];
        folders.extend(config.and_then(Path::parent).map(Path::to_path_buf));
        for data in data
            .into_iter()
            .flat_map(|data| [Some(data), data.parent()])
            .flatten()
        {
            folders.push(data.to_path_buf());
            folders.push(data.join("checkpoints"));
        }
        let mut places = folders.iter().map(|folder| folder.join(name));
        match places.find(|path| path.is_file()) {
            Some(path) => Ok(Some(path)),
            None => Err(format!(
                "there is no checkpoint {} here, beside the recipe or beside the data",
                name.display()
            )),
        }
    }
}
