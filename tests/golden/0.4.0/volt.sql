BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('4');
CREATE TABLE boot_sets (
	digest VARCHAR(145) NOT NULL, 
	ranges TEXT NOT NULL, 
	boots INTEGER NOT NULL, 
	PRIMARY KEY (digest)
);
CREATE TABLE departures (
	image_id INTEGER NOT NULL, 
	host VARCHAR(63) NOT NULL, 
	revision BIGINT NOT NULL, 
	confirmed BIGINT NOT NULL, 
	dropped BOOLEAN NOT NULL, 
	awaited BOOLEAN NOT NULL, 
	PRIMARY KEY (image_id, host), 
	FOREIGN KEY(image_id) REFERENCES images (id)
);
INSERT INTO "departures" VALUES(1,'gone',5,3,0,0);
CREATE TABLE edge_key (
	id INTEGER NOT NULL, 
	"key" BLOB NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "edge_key" VALUES(1,X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F');
CREATE TABLE hosts (
	name VARCHAR(63) NOT NULL, 
	address VARCHAR(512) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	last_seen FLOAT NOT NULL, 
	lease_s FLOAT, 
	agent VARCHAR(32) NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "hosts" VALUES('origin','unix:///run/origin/serve','alive',0.0,NULL,'');
INSERT INTO "hosts" VALUES('host-1','unix:///run/host-1/serve','alive',0.0,NULL,'');
INSERT INTO "hosts" VALUES('host-2','unix:///run/host-2/serve','alive',0.0,NULL,'');
INSERT INTO "hosts" VALUES('gone','unix:///run/gone/serve','alive',0.0,NULL,'');
CREATE TABLE images (
	id INTEGER NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	published BOOLEAN NOT NULL, 
	size BIGINT NOT NULL, 
	digest VARCHAR(145) NOT NULL, 
	fanout INTEGER NOT NULL, 
	revision BIGINT NOT NULL, 
	begun BIGINT NOT NULL, 
	withdrawn BOOLEAN NOT NULL, parent VARCHAR(63), 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "images" VALUES(1,'debian',1,1073741824,'sha256:0000000000000000000000000000000000000000000000000000000000000000',2,5,0,0,NULL);
CREATE TABLE nodes (
	image_id INTEGER NOT NULL, 
	host VARCHAR(63) NOT NULL, 
	slot INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	revision BIGINT NOT NULL, 
	awaited BIGINT NOT NULL, 
	confirmed BIGINT NOT NULL, 
	told BIGINT NOT NULL, 
	returned BIGINT, 
	fetched_bytes BIGINT NOT NULL, 
	parent VARCHAR(63), whole BOOLEAN DEFAULT 0 NOT NULL, 
	PRIMARY KEY (image_id, host), 
	FOREIGN KEY(image_id) REFERENCES images (id), 
	FOREIGN KEY(host) REFERENCES hosts (name)
);
INSERT INTO "nodes" VALUES(1,'origin',0,'joining',5,1,0,0,NULL,0,NULL,0);
INSERT INTO "nodes" VALUES(1,'host-2',2,'joining',5,3,2,2,NULL,0,NULL,0);
INSERT INTO "nodes" VALUES(1,'host-1',1,'joining',5,2,1,1,NULL,0,NULL,0);
CREATE INDEX ix_hosts_state ON hosts (state);
CREATE INDEX ix_images_digest ON images (digest);
CREATE INDEX ix_nodes_host ON nodes (host);
CREATE INDEX ix_departures_host_awaited ON departures (host, awaited);
COMMIT;