"""RecBole's SASRec with a sampled softmax over its items; tiny.yaml is a configuration of RecBole with loss_type CE."""

from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer
from recbole.utils import init_seed
import xsoftmax as xs

config = Config(model="SASRec", dataset="tiny", config_file_list=["tiny.yaml"])
train_data, valid_data, _ = data_preparation(config, create_dataset(config))
init_seed(0, True)
model = SASRec(config, train_data.dataset)
loss = xs.integrations.recbole.replace_head(model, xs.SampledSoftmaxLoss, sampler="uniform", num_samples=50)
trainer = Trainer(config, model)
trainer.optimizer = xs.optim.RowAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
best, found = trainer.fit(train_data, valid_data, saved=False, show_progress=False)
losses = list(trainer.train_loss_dict.values())
