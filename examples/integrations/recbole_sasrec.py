"""Trains RecBole's SASRec with a sampled softmax over its items.
tiny.yaml is a RecBole configuration with loss_type CE."""

from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer
from recbole.utils import init_seed
import xsoftmax as xs


class SampledSASRec(SASRec):
    """SASRec with a sampled loss over items. The item embedding gets
    row-sparse gradients both as input and as output layer."""
    def __init__(self, config, dataset):
        super().__init__(config, dataset)
        self.item_embedding.sparse = True
        items = xs.tables.linear(self.item_embedding.weight)
        self.loss = xs.SampledSoftmaxLoss.from_linear(
            items, sampler="uniform", num_samples=50,
            sparse_grad=True)

    def calculate_loss(self, interaction):
        hidden = self.forward(interaction[self.ITEM_SEQ],
                              interaction[self.ITEM_SEQ_LEN])
        return self.loss(hidden, interaction[self.POS_ITEM_ID])


config = Config(model="SASRec", dataset="tiny",
                config_file_list=["tiny.yaml"])
train_data, valid_data, _ = data_preparation(config,
                                             create_dataset(config))
init_seed(0, True)
model = SampledSASRec(config, train_data.dataset)
trainer = Trainer(config, model)
trainer.optimizer = xs.optim.RowAdam(model.parameters(), lr=1e-3,
                                     weight_decay=0.01)
best, found = trainer.fit(train_data, valid_data, saved=False,
                          show_progress=False)
losses = list(trainer.train_loss_dict.values())
