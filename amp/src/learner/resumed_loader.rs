//! The order of the data in a training that goes on.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::tensor::Device;

/// A loader of training batches that goes on where an earlier run stopped.
///
/// Burn's shuffling loader draws a new order for each epoch from one generator, which starts anew in
/// a new process; Burn's checkpoints do not hold it. So a resumed training would see the order of
/// the first epoch again. This draws, and drops, the orders of the epochs that are over.
///
/// ```
/// use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
/// use burn::data::dataset::InMemDataset;
/// use burn::tensor::Device;
/// use burn_lean_amp::ResumedDataLoader;
///
/// #[derive(Clone)]
/// struct AsIs;
///
/// impl Batcher<i32, Vec<i32>> for AsIs {
///     fn batch(&self, items: Vec<i32>, _device: &Device) -> Vec<i32> {
///         items
///     }
/// }
///
/// let loader = || {
///     let items = InMemDataset::new((0..100).collect());
///     DataLoaderBuilder::new(AsIs).batch_size(100).shuffle(7).build(items)
/// };
/// let epoch = |loader: &dyn DataLoader<Vec<i32>>| loader.iter().next().unwrap().unwrap();
/// let whole = loader();
/// let epochs = [epoch(&*whole), epoch(&*whole), epoch(&*whole)];
/// // The checkpoint is that of the second epoch.
/// let resumed = ResumedDataLoader::wrap(loader(), 2);
/// assert_eq!(epoch(&*resumed), epochs[2]);
/// ```
pub struct ResumedDataLoader<O> {
    loader: Arc<dyn DataLoader<O>>,
    epochs: usize,
    /// Epochs that are still to be dropped.
    remaining: AtomicUsize,
}

impl<O: 'static> ResumedDataLoader<O> {
    /// Wraps the training loader of a run that goes on after `epochs` epochs: what is given to
    /// `SupervisedTraining::checkpoint`. 0 changes nothing.
    pub fn wrap(loader: Arc<dyn DataLoader<O>>, epochs: usize) -> Arc<dyn DataLoader<O>> {
        Arc::new(Self {
            loader,
            epochs,
            remaining: AtomicUsize::new(epochs),
        })
    }
}

impl<O: 'static> DataLoader<O> for ResumedDataLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        for _ in 0..self.remaining.swap(0, Ordering::AcqRel) {
            drop(self.loader.iter());
        }
        self.loader.iter()
    }

    fn num_items(&self) -> usize {
        self.loader.num_items()
    }

    // Each of these has a generator of its own, forked from that of the whole.
    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Self::wrap(self.loader.to_device(device), self.epochs)
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        Self::wrap(self.loader.slice(start, end), self.epochs)
    }
}

impl<O> fmt::Debug for ResumedDataLoader<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResumedDataLoader")
            .field("epochs", &self.epochs)
            .finish_non_exhaustive()
    }
}
